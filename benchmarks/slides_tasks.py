"""Tasks and methods of `papers/slides.py`: the examples' own models, optimizers and data.

Every worker reads all samples, beginning with its own chunk (`SelDP`), whatever the method.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.data import SelDP
from offbeat.strategies import BSP, SSP, FedAvg, SelSync, Strategy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits  # pyright: ignore[reportMissingImports]
import gpt  # pyright: ignore[reportMissingImports]

BATCH = 8  # samples per worker and iteration
WINDOWS = 2816  # sequences in the GPT's epoch: two of the digits'
HELD_OUT_WINDOWS = 256
LAYERS, WIDTH, HEADS, CONTEXT = 2, 64, 4, 32
DIGITS_WIDTH = 128
GPT_RATE, DIGITS_RATE = 3e-3, 0.01

Batch = tuple[Tensor, Tensor]
Quality = tuple[float, float]
"""Held-out loss and accuracy (of the next byte, for the GPT)."""


class Task(ABC):
    """A model with its data; `script` trains the same one in the lab."""

    name: str
    script: tuple[str, ...]
    tolerance: float  # of the quality that BSP ends with

    def __init__(self, train: Batch, held_out: Batch) -> None:
        self.train, self.held_out = train, held_out

    @abstractmethod
    def model(self) -> nn.Module:
        """A new one, as torch's seed has it."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @abstractmethod
    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of one iteration."""

    @abstractmethod
    def figure(self, quality: Quality) -> float:
        """What counts of it."""

    @abstractmethod
    def reached(self, figure: float, target: float) -> bool: ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of a batch."""
        scores = model(batch[0])
        return nn.functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())

    def quality(self, model: nn.Module) -> Quality:
        """On what nobody trains on."""
        model.eval()
        with torch.no_grad():
            scores = model(self.held_out[0]).flatten(0, -2)
        targets = self.held_out[1].flatten()
        loss = nn.functional.cross_entropy(scores, targets).item()
        return loss, (scores.argmax(1) == targets).float().mean().item()

    def batches(self, rank: int, workers: int, seed: int) -> Iterator[Batch]:
        """A worker's batches, for ever."""
        sampler = SelDP(len(self.train[0]), rank=rank, world_size=workers, seed=seed)
        x, y = self.train
        for epoch in count():
            sampler.set_epoch(epoch)
            samples = iter(sampler)
            while len(chosen := list(islice(samples, BATCH))) == BATCH:
                yield x[chosen], y[chosen]

    def steps_per_epoch(self, workers: int) -> int:
        """Iterations in which all workers together read as many samples as there are."""
        return len(self.train[0]) // (BATCH * workers)


class Digits(Task):
    """The convolutional network on handwritten digits; SGD with momentum, constant rate."""

    name = "digits"
    script = ("digits.py", "--width", str(DIGITS_WIDTH), "--batch", str(BATCH))
    tolerance = 0.01

    def __init__(self) -> None:
        x, y = digits.digits()
        cut = digits.HELD_OUT_IMAGES
        super().__init__((x[cut:], y[cut:]), (x[:cut], y[:cut]))

    def model(self) -> nn.Module:
        return digits.network(DIGITS_WIDTH)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), DIGITS_RATE, momentum=0.9, weight_decay=1e-4)

    def rate(self, iteration: int, iterations: int) -> float:
        return DIGITS_RATE

    def figure(self, quality: Quality) -> float:
        return quality[1]

    def reached(self, figure: float, target: float) -> bool:
        return figure >= target - self.tolerance


class Gpt(Task):
    """The byte-level GPT on source code; AdamW, warm-up and cosine."""

    name = "gpt"
    script = (
        "gpt.py",
        *("--layers", str(LAYERS), "--width", str(WIDTH), "--heads", str(HEADS)),
        *("--context", str(CONTEXT), "--batch", str(BATCH), "--lr", str(GPT_RATE)),
    )
    tolerance = 0.03

    def __init__(self) -> None:
        train, held_out = gpt.corpus()
        rng = torch.Generator().manual_seed(0)
        super().__init__(
            gpt.batch_of(train, WINDOWS, CONTEXT, rng),
            gpt.batch_of(held_out, HELD_OUT_WINDOWS, CONTEXT, rng),
        )

    def model(self) -> nn.Module:
        return gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, GPT_RATE, betas=(0.9, 0.95))

    def rate(self, iteration: int, iterations: int) -> float:
        """Warm-up over a tenth, then a cosine down to a tenth."""
        warmup = iterations // 10
        progress = min(1.0, max(0, iteration - warmup) / (iterations - warmup))
        fall = 0.45 * (1 - math.cos(math.pi * progress))
        return GPT_RATE * min(1.0, (iteration + 1) / warmup) * (1 - fall)

    def figure(self, quality: Quality) -> float:
        return quality[0]

    def reached(self, figure: float, target: float) -> bool:
        return figure <= target + self.tolerance


def task_of(name: str) -> Task:
    """A task by its name."""
    return {task.name: task for task in (Digits, Gpt)}[name]()


def methods(steps_per_epoch: int, seed: int) -> dict[str, Strategy]:
    """What is compared, by the name in the tables."""

    def fedavg(fraction: float, share: float) -> FedAvg:
        steps = max(1, round(share * steps_per_epoch))
        return FedAvg(fraction, seed=seed, local_steps=steps)

    named: dict[str, Strategy] = {"BSP": BSP()}
    for fraction in (1.0, 0.5):
        for share in (0.25, 0.125):
            named[f"FedAvg ({fraction:g}, {share:g})"] = fedavg(fraction, share)
    for s in (10, 100):
        named[f"SSP {s}"] = SSP(s, "push")
    named["SSP 10, by clock"] = SSP(10, "clock")
    named["SSP 10, N servers"] = SSP(10, "push")
    for delta in (0.1, 0.3, 0.5):
        named[f"SelSync {delta:g}, PA"] = SelSync(delta)
    for delta in (0.1, 0.3, 0.5):
        named[f"SelSync {delta:g}, GA"] = SelSync(delta, aggregate="gradients")
    named["SelSync 0.3, layers"] = SelSync(0.3, scope="layer")
    # Smoothed norms hardly change with few workers (weight N / 100): two that vote more often.
    named["SelSync 0.03, PA"] = SelSync(0.03)
    named["SelSync 0.3, PA, changes"] = SelSync(0.3, smooth="change")
    return named


def servers_of(method: str, workers: int) -> int:
    """How many hosts serve, beside the workers."""
    return workers if method.endswith("N servers") else 1


def measured_methods(steps_per_epoch: int) -> dict[str, Strategy]:
    """Those that run in the lab."""
    chosen = ("BSP", "FedAvg (1, 0.25)", "SelSync 0.3, PA", "SSP 10")
    every = methods(steps_per_epoch, 0)
    return {name: every[name] for name in chosen}
