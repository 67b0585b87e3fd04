"""Breakdown of a prediction's error into compute, messages and waiting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from offbeat.core import words
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.run_directory import Contestant, Run
from offbeat.experiments.report.timeline import (
    Window,
    clock_offsets,
    estimated_iterations,
    predicted_window,
    recorded_runs,
    window_of,
)

WORTH_SAYING = 0.03  # least explained error, as a share of the measured iteration
NAMED = 0.1  # least share of the error for which a part is named

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
    """Predicted and measured parts of an iteration, as means over the recorded periods.

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


def split_of(
    run: Run, contestant: Contestant, predicted_s: float | None, measured_s: float | None
) -> Split | None:
    """Return the breakdown of a contestant's iteration.

    Returns:
        The breakdown. None if prediction or measurement is missing, or if no period is typical
        because iterations differ.
    """
    if predicted_s is None or measured_s is None:
        return None
    expected = predicted_window(contestant)
    traces = [rep.trace for rep in contestant.complete]
    if expected is None or any(trace.uneven or "gossip" in trace.notes for trace in traces):
        return None
    if "gossip" in expected.trace.notes or expected.trace.uneven:
        return None
    found = measured_parts(run, contestant)
    if found is None:
        return None
    measured, estimated = found
    return Split(parts_of(expected), measured, measured_s - predicted_s, estimated)


def measured_parts(run: Run, contestant: Contestant) -> tuple[Parts, bool] | None:
    """Return the parts of an iteration over all recorded periods, and whether they are estimated.

    The repetitions count by their recorded iterations. None without a recorded period.
    """
    windows = [
        (window_of(rep.trace, run_), bool(estimated_iterations(rep.trace).intersection(run_)))
        for rep in contestant.complete
        for run_ in recorded_runs(run, rep)
    ]
    timed = [one for one in windows if not one[1]] or windows
    if not timed:
        return None
    counts = [len(window.iterations) for window, _ in timed]
    parts = [parts_of(window) for window, _ in timed]
    values = zip(*map(astuple, parts), strict=True)
    return Parts(*(_weighted_mean(column, counts) for column in values)), timed[0][1]


def parts_of(window: Window) -> Parts:
    """Return the parts of a window, as means over the ranks with spans."""
    offsets = clock_offsets(window.trace)
    ways = _transfers(window.trace, offsets)
    every = [rank_parts(window, rank, ways[rank]) for rank in window.shown]
    count = len(window.iterations)
    return Parts(*(fmean(values) / count for values in zip(*every, strict=True)))


def explain_error(
    split: Split, measured_s: float, causes: Sequence[str] = (), place: str = "host"
) -> str:
    """Return sentences about the error of a prediction.

    Only parts above a tenth of the error are named, the largest first.

    Args:
        split: predicted and measured parts.
        measured_s: measured seconds per iteration.
        causes: sentences about known causes, added to a large error.
        place: "host", or "rank" if hosts have several ranks.
    """
    error = (measured_s - split.longer_s) / measured_s - 1
    if abs(error) <= WORTH_SAYING:
        return f"As predicted ({words.error(error)})."
    head = f"Predicted {words.error(abs(error))[1:]} too {'short' if error < 0 else 'long'}."
    if split.estimated:
        return " ".join([head, "The split of its iterations is estimated.", *causes])
    parts = [
        ("computed", split.compute_s, ""),
        ("waited", split.messages_s, " for its messages"),
        ("waited", split.waiting_s, f" for other {place}s"),
    ]
    named = [part for part in parts if abs(part[1]) > NAMED * abs(split.longer_s)]
    named.sort(key=lambda part: -abs(part[1]))
    texts, before = list[str](), ""
    for verb, seconds, what in named:
        texts.append(f"{verb} " * (verb != before) + _more_or_less(seconds) + what)
        before = verb
    return " ".join([head, *([f"It {words.join_texts(texts)}."] if texts else []), *causes])


def _more_or_less(seconds: float) -> str:
    return f"{words.seconds(abs(seconds))} {'longer' if seconds > 0 else 'less'}"


def _weighted_mean(values: Iterable[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def rank_parts(window: Window, rank: int, ways: Sequence[Interval]) -> tuple[float, ...]:
    """Return the values of `Parts` of one rank, in seconds of the whole window.

    `ways` are the intervals in which a message of the rank is on the way.
    """
    zero_s = window.zero_s[rank]
    edges = window.bounds_s(rank)
    within = zero_s + edges[0], zero_s + edges[-1]
    own = (span for span in window.shown[rank] if span.lane == COMPUTE)
    busy = _clip_intervals(((s.start_s, s.end_s) for s in own if s.kind != "wait"), within)
    sent = _clip_intervals(ways, within)
    compute_s, either_s = _union_length(busy), _union_length([*busy, *sent])
    return compute_s, either_s - compute_s, within[1] - within[0] - either_s, _union_length(sent)


def _transfers(trace: Trace, offsets: Sequence[float]) -> dict[int, list[Interval]]:
    """Return the transfer intervals of each rank, in seconds of the rank's own clock.

    A transfer begins when the last of its ranks has reached the message.
    """
    transfers: dict[int, list[Interval]] = defaultdict(list)
    for ends in group_by_message(trace.spans, Topology.from_record(trace.notes)):
        begin_s = max(span.start_s - offsets[span.rank] for span in ends)
        for span in ends:
            begun_s = min(begin_s + offsets[span.rank], span.end_s)
            transfers[span.rank].append((begun_s, span.end_s))
    return transfers


def group_by_message(spans: Iterable[Span], nodes: Topology | None = None) -> list[list[Span]]:
    """Group the spans of messages by message, with one span for each of its ranks.

    Where replicas have several ranks, a message inside has the ranks of a node. One between
    replicas has all ranks, or those of a column if replicas are sharded.
    """
    found: dict[tuple, list[Span]] = defaultdict(list)
    seen: Counter[tuple] = Counter()
    messages = (span for span in spans if span.lane != COMPUTE)
    for span in sorted(messages, key=lambda span: span.start_s):
        part = 0
        if nodes is not None and base_link(span.lane) == INSIDE:
            part = nodes.replica_of(span.rank)
        elif nodes is not None and nodes.sharded:
            part = nodes.member_of(span.rank)
        key = span.lane, span.iteration, span.kind, span.buckets, span.way, part
        number = seen[span.rank, key]  # distinguishes slices of one bucket
        seen[span.rank, key] += 1
        found[*key, number].append(span)
    return [*found.values()]


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
