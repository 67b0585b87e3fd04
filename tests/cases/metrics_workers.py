"""What ranks do to see metrics; a module of its own, so that processes can import it."""

from __future__ import annotations

import errno
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cases.workers import prepared, rank
from offbeat import WFBP, Planned, Profile, Strategy
from offbeat.metrics import Metrics, TensorBoard
from offbeat.profile import Bucket, Link

STEPS, EVERY, LR = 6, 2, 0.25
SIZES = (3, 5)


class Sums(nn.Module):
    """Its gradient is 1 for every parameter, so replicas differ by the same in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(size, 1, bias=False).double() for size in SIZES)

    def forward(self) -> Tensor:
        return self.first(torch.ones(SIZES[0]).double()) + self.last(torch.ones(SIZES[1]).double())


def profile() -> Profile:
    buckets = tuple(
        Bucket(f"{name}.weight", 0.001, 0.002, 8 * size)
        for name, size in zip(("last", "first"), reversed(SIZES), strict=True)
    )
    return Profile(buckets, (Link("net", 0.0, 1e9),), world_size=2)


def logged(strategy: Strategy) -> tuple[list[tuple[dict[str, float], int]], list[float]]:
    """What rank 1 logged under a strategy (nothing on rank 0, which is given no log), and the
    losses that it saw. Rank r goes down its own loss 1 + r times as fast."""
    seen: list[tuple[dict[str, float], int]] = []
    losses = []

    def log(numbers: Any, iteration: int) -> None:
        seen.append((dict(numbers), iteration))

    torch.manual_seed(0)
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    metrics = Metrics(log, EVERY, divergence_every=EVERY) if rank() == 1 else None
    known = profile() if isinstance(strategy, Planned) else None
    with prepared(model, optimizer, strategy, profile=known, metrics=metrics) as (model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (1 + rank()) * model().reshape(1)  # a mean of losses of one element
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            torch.distributed.barrier()  # so that both have left their samples
    return seen, losses


class FullDisk:
    """Writer whose files are on a full disk."""

    log_dir = "runs/full"
    calls = 0

    def add_scalar(self, *_: Any) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def log_on_full_disk() -> tuple[int, list[str], str]:
    """Calls of a writer in two iterations, warnings, and the error of a log that has a mistake."""
    writer, numbers = FullDisk(), dict[str, float]()
    logs = TensorBoard(writer), lambda *_: numbers["a mistake"]
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for log in logs:
            model = Sums()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            options = {"metrics": Metrics(log, 1), "observe": 1}
            with prepared(model, optimizer, WFBP(), **options) as (model, optimizer):
                for _ in range(2):
                    model().sum().backward()
                    try:
                        optimizer.step()
                    except KeyError:
                        error = "KeyError"
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    return writer.calls, texts, error


def log_alone() -> tuple[list[tuple[int, set[str]]], bool]:
    """Which numbers a lone rank logged when, and whether nothing watches backward afterwards."""
    seen: list[tuple[int, set[str]]] = []
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    metrics = Metrics(lambda numbers, iteration: seen.append((iteration, set(numbers))), 1, 1)
    options = {"metrics": metrics, "observe": 1}
    with prepared(model, optimizer, WFBP(), **options) as (model, optimizer):
        for _ in range(2):
            model().sum().backward()
            optimizer.step()
    return seen, not hasattr(torch.Tensor.backward, "tap")
