"""Timelines of single iterations in the record of a job: some periods, from time to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offbeat.core.plan import Plan
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.sim.trace import spans_to_dict
from offbeat.core.transport.device import Device
from offbeat.jobs.iteration_spans import iteration_spans

SPANS_PERIODS = 3  # periods of the plan in a timeline
SPANS_ITERATIONS = 8  # least number of iterations in a timeline
MOST_SPANS_BYTES = 1 << 16


class Timelines:
    """Timelines that a rank writes: `SPANS_PERIODS` periods each time that the iterations of the
    plan have doubled, which are the same iterations on all ranks.

    Args:
        write: function that appends a line, of kind and fields.
        number: number of this process.
        device: device of this rank.
        origin_s: origin of the times of the spans.
    """

    def __init__(
        self, write: Callable[..., None], number: int, device: Device, origin_s: float
    ) -> None:
        self._write, self._number = write, number
        self._device, self._origin_s = device, origin_s
        self._window = list[Iteration]()
        self._due = 0  # iteration of the plan from which the next timeline begins

    def restart(self) -> None:
        """Begin a timeline of another plan at once."""
        self._window, self._due = [], 0

    def add(self, done: Iteration, plan: Plan | None, before: int) -> None:
        """Collect an iteration, and write the spans of complete periods.

        Args:
            done: iteration that has ended.
            plan: plan that runs; None if the strategy has none.
            before: iterations before the first one of this process.
        """
        period = plan.period if plan is not None else 1
        if done.planned < max(self._due, period):
            return
        if done.split is not None and not done.split.measured:
            return
        if not self._window and done.planned % period:  # so that windows of ranks are alike
            return
        self._window.append(done)
        periods = max(SPANS_PERIODS, -(-SPANS_ITERATIONS // period))
        # torch's DDP measures single iterations.
        if len(self._window) <= (1 if done.split is not None else periods * period):
            return
        self._due = 2 * done.planned
        whole, self._window = self._window[:-1], []  # the device has reached all but the last
        self._write_spans(whole, plan, before)

    def _write_spans(self, whole: list[Iteration], plan: Plan | None, before: int) -> None:
        """Write the spans of as many whole periods as `MOST_SPANS_BYTES` hold."""
        while whole:
            spans = (
                span
                for one in whole
                for span in iteration_spans(one, plan, self._number, self._device, self._origin_s)
            )
            table = spans_to_dict(
                replace(span, start_s=round(span.start_s, 7), end_s=round(span.end_s, 7))
                for span in spans
            )
            if len(str(table)) <= MOST_SPANS_BYTES:
                self._write("spans", first=before + whole[0].number, spans=table)
                return
            whole = whole[: -(plan.period if plan is not None else 1)]
