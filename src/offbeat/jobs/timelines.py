"""Timelines of single iterations in the record of a job: some periods, from time to time."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.plan import Plan
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.sim.trace import spans_to_dict
from offbeat.core.transport.device import Device
from offbeat.jobs.iteration_spans import iteration_spans
from offbeat.jobs.record_lines import BackgroundWriter

SPANS_EVERY_S = 600.0  # time between two timelines of single iterations
SPANS_PERIODS = 3  # periods of the plan in a timeline
SPANS_ITERATIONS = 8  # least number of iterations in a timeline
MOST_SPANS_BYTES = 1 << 16


class Timelines:
    """Timelines that a rank writes: `SPANS_PERIODS` periods every `SPANS_EVERY_S` seconds.

    Args:
        writer: writer of the record.
        number: number of this process.
        device: device of this rank.
        origin_s: origin of the times of the spans.
    """

    def __init__(self, writer: BackgroundWriter, number: int, device: Device, origin_s: float):
        self._writer, self._number = writer, number
        self._device, self._origin_s = device, origin_s
        self._window = list[Iteration]()
        self._due_s = 0.0

    def restart(self) -> None:
        """Begin a timeline of another plan at once."""
        self._window, self._due_s = [], 0.0

    def add(self, done: Iteration, plan: Plan | None, before: int, now_s: float) -> None:
        """Collect an iteration, and write the spans of complete periods.

        Args:
            done: iteration that has ended.
            plan: plan that runs; None if the strategy has none.
            before: iterations before the first one of this process.
            now_s: monotonic seconds.
        """
        period = plan.period if plan is not None else 1
        if now_s < self._due_s or done.planned < period:
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
        self._due_s = now_s + SPANS_EVERY_S
        whole, self._window = self._window[:-1], []  # the device has reached all but the last
        self._write(whole, plan, before)

    def _write(self, whole: list[Iteration], plan: Plan | None, before: int) -> None:
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
                first = before + whole[0].number
                self._writer.detail("spans", first=first, origin_s=self._origin_s, spans=table)
                return
            whole = whole[: -(plan.period if plan is not None else 1)]
