"""Metrics of a training run, and adapters to TensorBoard and Weights & Biases.

    offbeat.prepare(model, optimizer, metrics=TensorBoard(writer))
    offbeat.prepare(model, optimizer, metrics=Metrics(run.log, every=50))

A log is a callable with arguments `(numbers, iteration)`: a function, or one of the adapters below.
Ranks without metrics log nothing, so `metrics=... if rank == 0 else None` is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.core.strategy.interface import require_count

Log = Callable[[Mapping[str, float], int], object]
"""Callable with the metrics by name and the number of finished iterations."""

SECONDS = "seconds_per_iteration"
"""Name of the seconds per iteration of this rank."""
EXPOSED = "exposed_communication_s"
"""Name of the part of `SECONDS` in which compute waits for messages."""
BYTES = "bytes_per_iteration"
"""Name of the bytes that this rank sends, followed by the link: `bytes_per_iteration/net`."""
DIVERGENCE = "divergence"
"""Name of the mean squared distance of the replicas from their mean."""
LOSS = "loss"
"""Name of the loss, the mean over this rank's calls of backward."""


@dataclass(frozen=True)
class Metrics:
    """Log of the metrics of a training run, and its period.

    Attributes:
        log: called every `every` iterations with means over these iterations.
        every: iterations between two calls of `log`.
        divergence_every: iterations between two samples of the divergence; 0: no samples. In such
            an iteration each rank stores a few of its parameters in the job's store. Once all
            samples of an iteration are stored, the ranks that log estimate the distance between the
            replicas. No rank waits for another rank. There are no samples of a model that is
            sharded over the ranks of a node.
    """

    log: Log
    every: int = 10
    divergence_every: int = 100

    def __post_init__(self) -> None:
        if not callable(self.log):
            raise ValueError(f"log ({self.log!r}) must be callable with (numbers, iteration)")
        require_count("every", self.every)
        require_count("divergence_every", self.divergence_every, least=0, remedy="0 turns it off")


def metrics_of(log: Metrics | Log | None) -> Metrics | None:
    """Return the log as `Metrics`."""
    return log if log is None or isinstance(log, Metrics) else Metrics(log)


class TensorBoard:
    """Log that writes scalars to a `torch.utils.tensorboard.SummaryWriter`.

    Args:
        writer: the writer, or any object with `add_scalar`.
        prefix: prefix of the names of all scalars.

    Attributes:
        path: directory of the writer, for warnings about failed writes.
    """

    def __init__(self, writer: Any, prefix: str = "offbeat/"):
        self._writer, self._prefix = writer, prefix
        self.path: Any = getattr(writer, "log_dir", None)

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(self._prefix + name, number, iteration)


class WandB:
    """Log that calls `run.log(numbers, step=...)`, the interface of Weights & Biases.

    Args:
        run: the run, or any object with such a `log`.
        prefix: prefix of the names of all metrics.
    """

    def __init__(self, run: Any, prefix: str = "offbeat/"):
        self._run, self._prefix = run, prefix

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        self._run.log({self._prefix + name: x for name, x in numbers.items()}, step=iteration)
