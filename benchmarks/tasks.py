"""Small tasks for benchmarks of numerics: the digits network, and the GPT with two layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits  # pyright: ignore[reportMissingImports]
import gpt  # pyright: ignore[reportMissingImports]

RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4  # as the digits example has them
LAYERS, WIDTH, HEADS, CONTEXT = 2, 64, 4, 64
PICTURES, SEQUENCES = 32, 8  # per batch
HELD_OUT_BATCHES = 16  # of text
ADAM_RATE, ADAM_DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)  # as the GPT example has them

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model with its optimizer, a rank's batches (of seed, number of ranks, rank), its loss,
    the held-out batches, and how many iterations the learning rate rises."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int, int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    held_out: Callable[[], list[Batch]]
    warmup: int

    def held_out_loss(self, model: nn.Module) -> float:
        """Mean over the held-out batches; the model as it is, `eval` is up to the caller."""
        batches = self.held_out()
        with torch.no_grad():
            return sum(self.loss(model, batch).item() for batch in batches) / len(batches)


# ---- pictures -------------------------------------------------------------------------------


@cache
def pictures() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, then those held out."""
    images, labels = digits.digits()
    held = digits.HELD_OUT_IMAGES
    return images[held:], labels[held:], images[:held], labels[:held]


def network(width: int) -> nn.Module:
    return digits.network(width)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=DECAY)


def picture_batches(seed: int, ranks: int, rank: int, batch: int = PICTURES) -> Iterator[Batch]:
    """Random images of this rank's part, for ever."""
    images, labels = (whole.chunk(ranks)[rank] for whole in pictures()[:2])
    rng = torch.Generator().manual_seed(seed * ranks + rank)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=rng)
        yield images[chosen], labels[chosen]


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# ---- text -----------------------------------------------------------------------------------


@cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and held-out ones."""
    return gpt.corpus()


def language_model() -> nn.Module:
    return gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": ADAM_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=ADAM_RATE, betas=BETAS)


def text_batches(seed: int, ranks: int, rank: int, batch: int = SEQUENCES) -> Iterator[Batch]:
    """Random windows of this rank's part, for ever."""
    mine = text()[0].chunk(ranks)[rank]
    rng = torch.Generator().manual_seed(seed * ranks + rank)
    while True:
        yield gpt.batch_of(mine, batch, CONTEXT, rng)


def held_out_text() -> list[Batch]:
    """The same windows every time."""
    rng = torch.Generator().manual_seed(0)
    return [gpt.batch_of(text()[1], SEQUENCES, CONTEXT, rng) for _ in range(HELD_OUT_BATCHES)]


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return gpt.loss_of(model, *batch)


# ---- tasks ----------------------------------------------------------------------------------


def digits_task(width: int, batch: int = PICTURES) -> Task:
    """The digits example."""
    return Task(
        partial(network, width),
        sgd,
        partial(picture_batches, batch=batch),
        picture_loss,
        lambda: [pictures()[2:]],
        warmup=1,
    )


GPT = Task(language_model, adamw, text_batches, text_loss, held_out_text, warmup=20)
