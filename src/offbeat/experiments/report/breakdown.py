"""Breakdown of a prediction's error into compute, messages and waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.record.run_directory import Contestant, Run
from offbeat.experiments.report import words
from offbeat.experiments.report.timeline import (
    Window,
    clock_offsets,
    estimated_iterations,
    measured_window,
    predicted_window,
)
from offbeat.experiments.report.traffic import group_by_message

WORTH_SAYING = 0.03  # least reported error, as a share of the measured iteration

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an iteration in seconds, as means over ranks.

    Attributes:
        compute_s: forward, backward, updates and the rest of the user's loop.
        messages_s: waits of a rank during a transfer of one of its messages.
        waiting_s: waits of a rank without such a transfer, for other ranks or for a message's turn.
        links_s: total time with a transfer, hidden or not; not a part of the iteration.
    """

    compute_s: float
    messages_s: float
    waiting_s: float
    links_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.messages_s + self.waiting_s


@dataclass(frozen=True, slots=True)
class Split:
    """Predicted and measured parts of one period, and their differences.

    The four differences `compute_s`, `messages_s`, `waiting_s` and `rest_s` add up to `longer_s`.
    `rest_s` is the difference between the run's median and the recorded period.

    Attributes:
        predicted: predicted parts.
        measured: measured parts.
        longer_s: measured minus predicted seconds per iteration.
        estimated: whether messages within backward were not timed, so that the measured parts
            assume the profiled compute time.
    """

    predicted: Parts
    measured: Parts
    longer_s: float
    estimated: bool = False

    @property
    def compute_s(self) -> float:
        return self.measured.compute_s - self.predicted.compute_s

    @property
    def messages_s(self) -> float:
        return self.measured.messages_s - self.predicted.messages_s

    @property
    def waiting_s(self) -> float:
        return self.measured.waiting_s - self.predicted.waiting_s

    @property
    def rest_s(self) -> float:
        return self.longer_s - self.compute_s - self.messages_s - self.waiting_s


def split_of(
    run: Run, contestant: Contestant, predicted_s: float | None, measured_s: float | None
) -> Split | None:
    """Return the breakdown of the period in the timeline.

    Returns:
        The breakdown. None if prediction or measurement is missing, or if no period is typical
        because of votes or gossip.
    """
    if predicted_s is None or measured_s is None:
        return None
    expected, found = predicted_window(contestant), measured_window(run, contestant)
    if expected is None or found is None or _is_untypical(expected) or _is_untypical(found[1]):
        return None
    estimated = not estimated_iterations(found[0].trace).isdisjoint(found[1].iterations)
    return Split(parts_of(expected), parts_of(found[1]), measured_s - predicted_s, estimated)


def parts_of(window: Window) -> Parts:
    """Return the parts of a window, as means over the ranks with spans."""
    offsets = clock_offsets(window.trace)
    ways = _transfers(window.trace.spans, offsets)
    every = [_rank_parts(window, rank, ways[rank]) for rank in window.shown]
    count = len(window.iterations)
    return Parts(*(fmean(values) / count for values in zip(*every, strict=True)))


def describe_split(split: Split, label: str) -> str | None:
    """Return one sentence about an error of more than 3 %, else None."""
    measured_s = split.measured.total_s + split.rest_s
    if abs(split.longer_s) <= WORTH_SAYING * measured_s:
        return None
    more = "longer" if split.longer_s > 0 else "less"
    head = f"{label} took {words.seconds(abs(split.longer_s))} per iteration {more} than predicted"
    if split.estimated:
        return f"{head}; how much of it is compute and how much messages is only estimated."
    rest = f", {_difference(split.rest_s)} otherwise" if _is_notable(split.rest_s, split) else ""
    return (
        f"{head}: {_difference(split.compute_s)} compute ({_describe_compute(split)}), "
        f"{_difference(split.messages_s)} messages, {_difference(split.waiting_s)} waiting{rest}."
    )


def _describe_compute(split: Split) -> str:
    """Return a phrase such as '18 % slower than profiled'."""
    before_s = split.predicted.compute_s
    percent = round(100 * split.compute_s / before_s) if before_s else 0
    if not percent:
        return "as profiled"
    return f"{abs(percent)} % {'slower' if percent > 0 else 'faster'} than profiled"


def _difference(seconds: float) -> str:
    sign = "+" if seconds >= 0 else "−"
    return sign + words.seconds(abs(seconds))


def _is_notable(seconds: float, split: Split) -> bool:
    return abs(seconds) > 0.1 * abs(split.longer_s)


def _is_untypical(window: Window) -> bool:
    """Whether the window's iterations are not typical, because of votes or gossip."""
    return window.trace.uneven or "gossip" in window.trace.notes


def _rank_parts(window: Window, rank: int, ways: Sequence[Interval]) -> tuple[float, ...]:
    zero_s = window.zero_s[rank]
    edges = window.bounds_s(rank)
    within = zero_s + edges[0], zero_s + edges[-1]
    own = (span for span in window.shown[rank] if span.lane == COMPUTE)
    busy = _clip_intervals(((s.start_s, s.end_s) for s in own if s.kind != "wait"), within)
    sent = _clip_intervals(ways, within)
    compute_s, either_s = _union_length(busy), _union_length([*busy, *sent])
    return compute_s, either_s - compute_s, within[1] - within[0] - either_s, _union_length(sent)


def _transfers(spans: Iterable[Span], offsets: Sequence[float]) -> dict[int, list[Interval]]:
    """Return the transfer intervals of each rank, in seconds of the rank's own clock.

    A transfer begins when the last of its ranks has reached the message.
    """
    transfers: dict[int, list[Interval]] = defaultdict(list)
    for ends in group_by_message(spans):
        begin_s = max(span.start_s - offsets[span.rank] for span in ends)
        for span in ends:
            begun_s = min(begin_s + offsets[span.rank], span.end_s)
            transfers[span.rank].append((begun_s, span.end_s))
    return transfers


def _clip_intervals(spans: Iterable[Interval], within: Interval) -> list[Interval]:
    low, high = within
    return [(max(a, low), min(b, high)) for a, b in spans if a < high and b > low]


def _union_length(spans: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
