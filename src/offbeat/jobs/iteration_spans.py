"""Spans of a recorded iteration, for timelines."""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.core.derive.windows import Windows
from offbeat.core.plan import BUILT_IN, Plan
from offbeat.core.runtime.iteration import Iteration, MomentTimes, Timestamps
from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.core.transport.device import Device, Mark


def iteration_spans(
    done: Iteration, plan: Plan | None, rank: int, device: Device, origin: float
) -> Iterator[Span]:
    """Yield the spans of an iteration. Waits until the device has reached its end."""

    def at(mark: Mark) -> float:
        return device.seconds(mark) - origin

    size = plan.buckets if plan is not None else len(done.marks.ready)
    buffers = plan.all_buffers if plan is not None else BUILT_IN
    split, windows = done.split, None if plan is None else Windows(plan)
    first = done.number - done.planned  # iteration of the run with which the plan has begun
    for kind, start, end, bucket in _compute_intervals(done.marks, size, device):
        run = None if bucket is None else (bucket, bucket + 1)
        if kind == "backward" and bucket is None and split is not None:
            begin_s, end_s = at(start), at(end)
            middle_s = max(begin_s, end_s - split.waited_s)
            yield Span(rank, COMPUTE, "backward", done.number, begin_s, middle_s)
            yield Span(rank, COMPUTE, "wait", done.number, middle_s, end_s)
            sent = (max(begin_s, end_s - split.sent_s), end_s)
            whole = (0, size) if size else None
            yield Span(rank, split.link, "grad", done.number, *sent, whole, split.sent_bytes)
            continue
        yield Span(rank, COMPUTE, kind, done.number, at(start), at(end), run)
    for message in done.messages:
        if message.end is None:  # failed, skipped, or unfinished at the end of the run
            continue
        t = message.transfer
        run = (t.payload.buckets.start, t.payload.buckets.stop)
        half = t.verb in ("reduce_scatter", "all_gather")
        kind = t.verb if half or t.verb == "broadcast" else buffers[t.payload.buffer].kind
        start, end = at(message.start), at(message.end)
        held = None if windows is None else windows.carried_window(done.planned, t.payload)
        carries = None if held is None else (first + held.start, first + held.stop)
        size = message.sent_bytes
        yield Span(rank, t.link, kind, done.number, start, end, run, size, carries, t.way)


def _compute_intervals(
    marks: Timestamps, buckets: int, device: Device
) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    """Yield (kind, start, end, bucket) of each interval of the compute lane, in order."""
    at, bucket = marks.begin, None
    forward = [acted for acted in marks.acted if acted.position < buckets]
    backward = {acted.position - buckets: acted for acted in marks.acted}
    if marks.forward is not None:
        early, later = _split_actions(forward, marks, device)
        for acted in early:
            yield "other", at, acted.begin, None
            yield from _action_spans(acted, buckets - 1 - acted.position)
            at = acted.applied
        yield "other", at, marks.forward, None
        at = marks.forward
        for acted in later:
            yield "forward", at, acted.begin, bucket
            bucket = buckets - 1 - acted.position
            yield from _action_spans(acted, bucket)
            at = acted.applied
        yield "forward", at, marks.forward_end, bucket
        at = marks.forward_end
    for b, ready in enumerate(marks.ready):
        if ready is not None:
            yield "backward", at, ready, b
            at = ready
        if b in backward:
            yield from _action_spans(backward[b], b)
            at = backward[b].applied
    yield "backward", at, marks.backward_end, None
    yield "wait", marks.backward_end, marks.waited, None
    yield "other", marks.waited, marks.step, None
    yield "update", marks.step, marks.stepped, None
    yield "wait", marks.stepped, marks.end, None


def _split_actions(
    forward: list[MomentTimes], marks: Timestamps, device: Device
) -> tuple[list[MomentTimes], list[MomentTimes]]:
    """Split updates in forward into those before the recorded forward and those within it."""
    if not forward:
        return [], []
    begin_s = device.seconds(marks.forward)
    early = [acted for acted in forward if device.seconds(acted.begin) < begin_s]
    return early, forward[len(early) :]


def _action_spans(acted: MomentTimes, bucket: int) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    yield "wait", acted.begin, acted.waited, bucket
    yield "update", acted.waited, acted.applied, bucket
