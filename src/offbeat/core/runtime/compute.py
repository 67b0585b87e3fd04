"""Compute: who is told what a rank computes, and may hold it up."""

from __future__ import annotations

from offbeat.core.plan import Apply


class Compute:
    """Told of every piece of compute as it ends; this one does nothing.

    `begins` returns the seconds for which the rank was held up before it computed anything.
    """

    def on_iteration_begin(self, iteration: int, begin_s: float) -> float:
        """The forward of an iteration that began at `begin_s` (perf_counter) begins."""
        return 0.0

    def forward(self, bucket: int) -> None:
        """The forward of every bucket above this one is over; -1: all of it."""

    def backward(self, bucket: int) -> None:
        """The backward of buckets up to this one is over."""

    def on_backward_end(self) -> None:
        """Backward is over; waits for messages come next."""

    def on_step_begin(self) -> None:
        """What the step waits for is there."""

    def on_update(self, apply: Apply) -> None:
        """The optimizer has stepped some buckets."""

    def on_step_end(self) -> None:
        """The step is over."""

    def on_wait_end(self) -> None:
        """A message had to be waited for, and is there."""
