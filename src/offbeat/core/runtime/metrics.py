"""Metrics: what a run tells of itself while it trains, and adapters that pass it on.

    offbeat.prepare(model, optimizer, metrics=TensorBoard(writer))
    offbeat.prepare(model, optimizer, metrics=Metrics(run.log, every=50))

A log is anything that takes `(numbers, iteration)`: a function, or one of the adapters below. Ranks
that are given none log nothing, so `metrics=... if rank == 0 else None` is fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Log = Callable[[Mapping[str, float], int], object]
"""Called with numbers by name and how many iterations were made."""

SECONDS = "seconds_per_iteration"
EXPOSED = "exposed_communication_s"  # of those: waiting for messages, with nothing to compute
BYTES = "bytes_per_iteration"  # sent by this rank; by link, as bytes_per_iteration/net
DIVERGENCE = "divergence"  # Gamma: mean squared distance of replicas from their mean
LOSS = "loss"  # what backward was called on, mean of this rank's


@dataclass(frozen=True)
class Metrics:
    """Who is told, and how often.

    `log` is called every so many iterations with means over them. Every `divergence_every`
    iterations (0: never) each rank leaves a few of its parameters in the job's store. From these
    the ranks that log estimate how far replicas are apart, once all have come so far. Nobody waits.
    """

    log: Log
    every: int = 10
    divergence_every: int = 100

    def __post_init__(self) -> None:
        if not callable(self.log):
            raise ValueError(f"log ({self.log!r}) must be callable with (numbers, iteration)")
        if self.every < 1:
            raise ValueError(f"every ({self.every}) must be at least 1 iteration")
        if self.divergence_every < 0:
            raise ValueError(
                f"divergence_every ({self.divergence_every}) must be a number of iterations, or 0 "
                "for never"
            )


class TensorBoard:
    """Scalars of a `torch.utils.tensorboard.SummaryWriter`, or of anything with `add_scalar`.

    `path`: directory of the writer, which a warning about failed writes names.
    """

    def __init__(self, writer: Any, prefix: str = "offbeat/"):
        self._writer, self._prefix = writer, prefix
        self.path = getattr(writer, "log_dir", None)

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(self._prefix + name, number, iteration)


class WandB:
    """One `run.log(numbers, step=...)`, as Weights & Biases and its likes have it."""

    def __init__(self, run: Any, prefix: str = "offbeat/"):
        self._run, self._prefix = run, prefix

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        self._run.log({self._prefix + name: x for name, x in numbers.items()}, step=iteration)


class Prometheus:
    """Gauges of prometheus_client, as `offbeat_loss`, and `offbeat_bytes_per_iteration` by link."""

    def __init__(self, registry: Any = None):
        self._of, self._gauges = {"registry": registry} if registry is not None else {}, {}

    def __call__(self, numbers: Mapping[str, float], iteration: int) -> None:
        for name, number in {**numbers, "iteration": iteration}.items():
            base, _, link = name.partition("/")
            gauge = self._gauges.get(base) or self._create_gauge(base, ["link"] if link else [])
            (gauge.labels(link) if link else gauge).set(number)

    def _create_gauge(self, base: str, labels: list[str]) -> Any:
        from prometheus_client import Gauge

        self._gauges[base] = Gauge(f"offbeat_{base}", base.replace("_", " "), labels, **self._of)
        return self._gauges[base]
