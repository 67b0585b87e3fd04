"""Measurement points of the gradient noise within an iteration."""

from __future__ import annotations

from offbeat.core.measuring.noise import NoiseMeter
from offbeat.core.runtime.active_plan import ActivePlan


class Metering:
    """Passes each rank's own gradients, complete and not yet sent, and their averages to a noise
    meter.

    If some gradients are sent during backward, the meter receives each bucket when it is ready.
    Without a meter the methods do nothing.
    """

    def __init__(self, meter: NoiseMeter | None, run: ActivePlan):
        self._meter, self._run = meter, run
        early = any(t.after.point == "grad" for t in run.plan.transfers)
        self.by_bucket = meter is not None and early
        self._age = max((a.arg("age", 0) for a in run.plan.applies), default=0)
        self._everything = range(run.plan.buckets)

    def on_bucket_ready(self, b: int, planned: int) -> None:
        """Pass the gradients of bucket `b` to the meter. Call it only if `by_bucket`."""
        if self._run.windows.closes_window(planned):
            self._record_own_gradients(range(b, b + 1))

    def on_backward_end(self, planned: int) -> None:
        """Pass the gradients of all buckets to the meter, unless it has received them bucket by
        bucket."""
        if self._meter is None or not self._run.windows.closes_window(planned):
            return
        if not self.by_bucket:
            self._record_own_gradients(self._everything)
        self._meter.complete()

    def on_averages_arrived(self, planned: int) -> None:
        """Pass the averages that the step applies to the meter."""
        if self._meter is None:
            return
        if applied := self._run.windows.applied_window(planned):
            copy = self._run.flat.copy_index("grad", self._age)
            gradients = list(self._run.gradients.gradient_tensors(self._everything, copy))
            self._meter.add_average(gradients, len(applied))

    def reset(self) -> None:
        """Discard the gradients of the current window, because they will not be averaged."""
        if self._meter is not None:
            self._meter.reset()

    def _record_own_gradients(self, run: range) -> None:
        assert self._meter is not None
        copy = self._run.flat.copy_index("grad")
        self._meter.add_own(list(self._run.gradients.gradient_tensors(run, copy)))
