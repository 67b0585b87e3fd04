"""What the ranks of the tests of checkpoints do."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import Case, batch, build_model, build_optimizer, build_scheduler, loss_of, profile_of
from workers import TIMEOUT_S, rank, world_size

import offbeat
from offbeat import Strategy

CASE = Case("conv", "nesterov", "step")


class Job:
    """A training script: model, optimizer and scheduler of a case, and a loop with random numbers
    of every kind."""

    def __init__(self, strategy: Strategy, case: Case = CASE, **options: Any):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + rank())
        model = build_model(case, seed=rank())
        torch.manual_seed(100 + rank())
        options = {"profile": profile_of(case, world_size())} | options
        self.case = case
        self.model, self.optimizer = offbeat.prepare(
            model, build_optimizer(case, model), strategy, timeout_s=TIMEOUT_S, **options
        )
        self.scheduler = build_scheduler(case, self.optimizer)
        self.extra = {"scheduler": self.scheduler} if self.scheduler else {}

    def iterate(self, t: int) -> None:
        self.optimizer.zero_grad()
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        (noise * loss_of(self.model, *batch(self.case, rank(), t))).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def train(self, iterations: range) -> None:
        for t in iterations:
            self.iterate(t)

    def save(self, path: str, **options: Any) -> Any:
        return offbeat.save(path, self.model, self.optimizer, self.extra, **options)

    def load(self, path: str) -> Any:
        return offbeat.load(path, self.model, self.optimizer, self.extra)

    def digest(self) -> str:
        """Of all bits of weights, buffers, optimizer state and settings."""
        found = hashlib.sha256()
        state = self.optimizer.state_dict()
        for name, tensor in self.model.state_dict().items():
            found.update(name.encode() + tensor.detach().numpy().tobytes())
        for index, mine in sorted(state["state"].items()):
            for name, value in sorted(mine.items()):
                array = value.numpy() if isinstance(value, torch.Tensor) else np.array(value)
                found.update(f"{index}{name}".encode() + array.tobytes())
        found.update(repr([{**g, "params": 0} for g in state["param_groups"]]).encode())
        return found.hexdigest()


@contextmanager
def job(strategy: Strategy, case: Case = CASE, **options: Any) -> Iterator[Job]:
    made = Job(strategy, case, **options)
    yield made
    made.model.close()


Trial = tuple[Strategy, Case, int]


def train_and_save(trials: Sequence[Trial], folder: str) -> list[str]:
    """Per trial the digest after all iterations, of a run that was saved at every position and of
    one that never was; they must be the same."""
    digests = []
    for number, (strategy, case, iterations) in enumerate(trials):
        with job(strategy, case) as plain:
            plain.train(range(iterations))
            expected = plain.digest()
        with job(strategy, case) as saved:
            for t in range(iterations):
                saved.iterate(t)
                saved.save(f"{folder}/{number}", keep=iterations).wait()
            assert saved.digest() == expected, f"saving disturbs {strategy}"
        digests.append(expected)
    return digests


def resume_everywhere(
    trials: Sequence[Trial], folder: str
) -> list[tuple[str, list[tuple[int, str]]]]:
    """Per trial the digests after going on from every position."""
    found = []
    for number, (strategy, case, iterations) in enumerate(trials):
        digests = []
        names = sorted(p.name for p in Path(folder, str(number)).iterdir())
        for name in names[:-1]:
            with job(strategy, case) as resumed:
                checkpoint = resumed.load(f"{folder}/{number}/{name}")
                assert checkpoint.exact
                start = offbeat.iteration(resumed.model)
                resumed.train(range(start, iterations))
                digests.append((start, resumed.digest()))
        found.append((str(strategy), digests))
    return found
