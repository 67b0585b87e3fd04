"""Observer of the compute of a rank; its subclasses can delay the compute."""

from __future__ import annotations

from offbeat.core.plan import Apply


class ComputeObserver:
    """Receiver of callbacks at the end of each piece of compute. This base class does nothing."""

    def on_iteration_begin(self, iteration: int, begin_s: float) -> float:
        """Handle the start of an iteration's forward.

        Args:
            iteration: number of the iteration.
            begin_s: time at which the iteration began (`time.perf_counter`).

        Returns:
            Seconds for which this call has delayed the rank.
        """
        return 0.0

    def forward(self, bucket: int) -> None:
        """Handle the end of the forward of all buckets above `bucket`; -1: all buckets."""

    def backward(self, bucket: int) -> None:
        """Handle the end of the backward of buckets 0..`bucket`."""

    def on_backward_end(self) -> None:
        """Handle the end of backward, before the wait for messages."""

    def on_step_begin(self) -> None:
        """Handle the arrival of all messages that the step needs."""

    def on_update(self, apply: Apply) -> None:
        """Handle the end of an optimizer update of some buckets."""

    def on_step_end(self) -> None:
        """Handle the end of the step."""

    def on_wait_end(self) -> None:
        """Handle the end of a wait for a message."""
