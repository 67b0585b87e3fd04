"""Conversion of an engine's result to the spans of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offbeat.core.derive import effects
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.program import Step
from offbeat.core.sim.job import Run
from offbeat.core.sim.trace import COMPUTE, Span

ROUNDING = 1e-12  # share of the current time; a shorter wait is a rounding error


def rank_spans(
    run: Run, rank: int, record: range, number: Callable[[int], int], windows: Windows
) -> list[Span]:
    """Return the spans of one rank, sorted by start.

    Args:
        run: result of an engine.
        rank: rank of the spans.
        record: iterations of `run` with spans.
        number: function from an iteration of `run` to the iteration number in the spans.
        windows: accumulation windows of the plan.
    """
    builder = _SpanBuilder(run, rank, number, windows)
    compute = [span for iteration in record for span in builder.compute_spans(iteration)]
    return sorted([*compute, *builder.messages], key=lambda span: span.start_s)


class _SpanBuilder:
    """Builder of one rank's spans from the steps of its program.

    Attributes:
        messages: spans on links, collected while `compute_spans` runs.
    """

    def __init__(self, run: Run, rank: int, number: Callable[[int], int], windows: Windows) -> None:
        self.run, self.rank, self.number, self.windows = run, rank, number, windows
        self.program, self.costs = run.program(rank), run.job.costs
        self.messages: list[Span] = []
        self._now = 0.0

    def compute_spans(self, iteration: int) -> Iterator[Span]:
        """Yield the spans on compute of one iteration. Call in the order of iterations."""
        run, buckets = self.run, self.run.job.plan.buckets
        if iteration:
            row = min(self.rank, run.ends_s.shape[1] - 1)
            self._now = max(self._now, float(run.ends_s[iteration - 1, row]))
        self._add_received_messages(iteration)
        yield from self._spend("other", iteration, run.job.profile.other_s, None)
        factor = run.factor(iteration, self.rank)
        steps = {step.position: step for step in self.program.program.steps(iteration)}
        for place in range(2 * buckets + 2):
            for kind, bucket in self.costs.work_before(place):
                seconds = self.costs.work_s(kind, bucket) * factor
                yield from self._spend(kind, iteration, seconds, bucket)
            if place in steps:
                yield from self._step_spans(iteration, steps[place], factor)

    def _step_spans(self, iteration: int, step: Step, factor: float) -> Iterator[Span]:
        until_s = self._wait_end_s(iteration, step)
        if until_s - self._now > ROUNDING * self._now:
            yield from self._spend("wait", iteration, until_s - self._now, None)
        self._now = max(self._now, until_s)
        for lag, apply in step.apply:
            seconds = self.costs.apply_s(apply)
            if seconds is not None and self.program.is_on(apply, iteration - lag):
                kind = "update" if effects.is_update(apply) else apply.rule
                for bucket, one_s in zip(apply.buckets, seconds.tolist(), strict=True):
                    yield from self._spend(kind, iteration, one_s * factor, bucket)
        for index in step.release:
            self._add_message(iteration, index, received=False)
        sending_s = self.program.sending_s(iteration, step) * factor
        if sending_s:
            yield from self._spend("sending", iteration, sending_s, None)

    def _spend(
        self, kind: str, iteration: int, seconds: float, bucket: int | None
    ) -> Iterator[Span]:
        """Advance the time and yield the span. Without a bucket, a span of 0 s is left out."""
        begun, self._now = self._now, self._now + seconds
        if self._now > begun or bucket is not None:
            buckets = None if bucket is None else (bucket, bucket + 1)
            shown = self.number(iteration)
            yield Span(self.rank, COMPUTE, kind, shown, begun, self._now, buckets)

    def _wait_end_s(self, iteration: int, step: Step) -> float:
        """Return the time at which all messages and votes that a step waits for have arrived."""
        until_s = 0.0
        for lag, index in step.wait:
            slot = self.program.slot(iteration, lag, index)
            t = self.program.program.transfers(iteration - lag)[index]
            if self.program.is_on(t, iteration - lag):
                times = self.run.queue_of(slot.link, self.rank).span_s(iteration, slot)
                assert times is not None
                until_s = max(until_s, times[2])
        for lag, vote in step.decide:
            until_s = max(until_s, self.run.known_s[vote.name, iteration - lag])
        return until_s

    # ---- messages ---------------------------------------------------------------------------

    def _add_received_messages(self, iteration: int) -> None:
        for index, t in enumerate(self.program.program.transfers(iteration)):
            if t.only_receives(self.rank):
                self._add_message(iteration, index, received=True)

    def _add_message(self, iteration: int, index: int, *, received: bool) -> None:
        """Append the span of a message on this rank.

        The span starts when this rank issues the message, which may be before other ranks do. On
        the receiver of a send it starts with the transfer.
        """
        slot = self.program.slot(iteration, 0, index)
        t = self.program.program.transfers(iteration)[index]
        times = self.run.queue_of(slot.link, self.rank).span_s(iteration, slot)
        if times is None or not self.program.is_on(t, iteration):
            return
        free_s, begun_s, end_s = times
        carried = self.windows.carried_window(self.number(iteration), t.payload)
        span = Span(
            self.rank,
            t.link,
            self.run.job.plan.all_buffers[t.payload.buffer].kind
            if t.verb == "all_reduce"
            else t.verb,
            self.number(iteration),
            begun_s if received else min(max(self._now, free_s), end_s),
            end_s,
            (t.payload.buckets.start, t.payload.buckets.stop),
            self.costs.message_bytes(t, self.rank),
            None if carried is None else (carried.start, carried.stop),
            t.way,
        )
        self.messages.append(span)
