"""Windows of a trace: typical iterations of all ranks, on one clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from offbeat.core.plan import CHANNEL, INSIDE, base_link
from offbeat.core.sim.trace import COMPUTE, Span, Trace, shift_span
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.run_directory import Contestant, Repetition, Run, count_skipped

GRADIENTS = ("grad", "reduce_scatter", "all_gather")  # kinds of messages that hold gradients

Generation = tuple[int, int]  # iterations [first, stop) whose gradients are one sum
Key = tuple[str, str, tuple[int, int] | None, tuple[int, int] | None]


def held_generation(span: Span) -> Generation | None:
    """Return the iterations whose gradients a message holds; None without gradients."""
    if span.lane == COMPUTE or span.kind not in GRADIENTS:
        return None
    return span.carries or (span.iteration, span.iteration + 1)


@dataclass(frozen=True)
class Generations:
    """Generations in the messages of a trace, in order.

    Attributes:
        known: all generations.
        late: whether a message holds gradients of other iterations than its own.
    """

    known: tuple[Generation, ...] = ()
    late: bool = False

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> Generations:
        """Return the generations that the messages in `spans` carry."""
        found = {(span.iteration, held) for span in spans if (held := held_generation(span))}
        late = any(held != (iteration, iteration + 1) for iteration, held in found)
        return cls(tuple(sorted({held for _, held in found})), late)

    def generation_of(self, span: Span) -> Generation | None:
        """Return the generation that a message holds or an update applies; None if unknown."""
        held = (
            span.carries
            or held_generation(span)
            or (self._applied_generation(span) if self.late else None)
        )
        return held if held in self.known else None

    def _applied_generation(self, span: Span) -> Generation | None:
        """Return the generation of an update: the one before the generation that it closes."""
        if span.kind != "update":
            return None
        closed = next((g for g in self.known if g[1] == span.iteration + 1), None)
        return next((g for g in self.known if closed and g[1] == closed[0]), None)


@dataclass(frozen=True)
class Window:
    """Consecutive iterations of a trace.

    Attributes:
        trace: the trace.
        iterations: the iterations of the window.
        zero_s: begin of the window, by rank, in seconds of the rank's clock.
        length_s: length of the window.
        shown: spans in the window by rank, in order of start. Messages of neighbouring iterations
            that reach into the window are included.
    """

    trace: Trace
    iterations: range
    zero_s: tuple[float, ...]
    length_s: float
    shown: Mapping[int, tuple[Span, ...]]

    @property
    def stands_for_all(self) -> bool:
        """Whether one simulated row represents all ranks."""
        return self.trace.world_size == 1 and self.trace.notes.get("ranks", 1) > 1

    @property
    def generations(self) -> Generations:
        """Generations of the window's messages."""
        return Generations.from_spans(self.trace.spans)

    def bounds_s(self, rank: int) -> list[float]:
        """Return the begins of the rank's iterations and the end of the last one, from `zero_s`."""
        first = self.iterations.start
        edges = [start_of(self.trace, rank, first)]
        edges += [self.trace.ends_s[rank][i - self.trace.first] for i in self.iterations]
        return [edge - self.zero_s[rank] for edge in edges]


def measured_window(
    run: Run, contestant: Contestant, length_s: float | None = None
) -> tuple[Repetition, Window] | None:
    """Return typical recorded iterations of the first complete repetition; None without spans.

    The window is a typical period, or begins with one and is `length_s` long if as much was
    recorded. The typical period sends most of the predicted messages. Among several such periods,
    it is the one with a duration nearest to their median.
    """
    for rep in contestant.complete:
        start = _typical_start(run, contestant, rep, length_s or 0.0)
        if start is not None:
            period = range(start, start + rep.trace.period)
            # Row r of the merged trace's `ends_s` is rank r.
            assert [record.rank for record in rep.ranks] == list(range(len(rep.ranks)))
            return rep, window_of(rep.trace, period, length_s)
    return None


def predicted_window(contestant: Contestant, length_s: float | None = None) -> Window | None:
    """Return the simulated period, repeated up to `length_s`.

    A message that crosses the end of the period also enters at its begin.
    """
    trace = contestant.predicted
    if trace is None or not trace.spans or trace.iterations < trace.period:
        return None
    # A simulation may keep the spans of its last iterations only.
    start = max(trace.first, min(span.iteration for span in trace.spans))
    if trace.iterations == trace.period:
        period_s = trace.iteration_s() * trace.period
        copies = math.ceil(length_s / period_s) if length_s and period_s else 1
        trace = _repeat_period(trace, copies)
    return window_of(trace, range(start, start + trace.period), length_s)


def recorded_runs(run: Run, rep: Repetition) -> list[range]:
    """Return the recorded iterations that are measured, in runs of whole periods.

    Iterations with an estimated split are left out if a whole period remains.
    """
    trace = rep.trace
    starts = _measured_starts(run, rep, _whole_periods(trace, _recorded_iterations(trace)))
    runs: list[range] = []
    for start in starts:
        if runs and start < runs[-1].stop:
            continue
        if runs and start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, start + trace.period)
        else:
            runs.append(range(start, start + trace.period))
    return runs


def estimated_iterations(trace: Trace) -> set[int]:
    """Return the iterations whose waits in backward are estimated."""
    return set(trace.notes.get("estimated", ()))


def start_of(trace: Trace, rank: int, iteration: int) -> float:
    """Return the begin of an iteration on a rank, in seconds."""
    index = iteration - trace.first
    return trace.ends_s[rank][index - 1] if index else trace.starts_s[rank]


def lanes_of(windows: Iterable[Window | None], links: Iterable[str]) -> list[str]:
    """Return the lanes: compute, the links in order of the profile with channels, then others."""
    used = {span.lane for w in windows if w for spans in w.shown.values() for span in spans}
    order = [COMPUTE, *links]

    def place(lane: str) -> tuple[int, str, int, str]:
        base = base_link(lane)
        return order.index(base) if base in order else len(order), base, len(lane), lane

    return sorted(used | {COMPUTE}, key=place)


def lane_name(lane: str, names: Mapping[str, str] | None = None) -> str:
    """Return the display name of a lane: 'net', 'net, channel 2'. `names` are displayed instead of
    those of links."""
    base, mark, index = lane.partition(CHANNEL)
    base = (names or {}).get(base, base)
    return f"{base}, channel {int(index) + 1}" if index.isdecimal() else base + mark + index


def _typical_start(
    run: Run, contestant: Contestant, rep: Repetition, length_s: float
) -> int | None:
    trace = rep.trace
    sent = _sent_messages(trace, rep.ranks[0].rank)
    starts = _measured_starts(run, rep, _whole_periods(trace, sent))
    if not starts:
        return None
    if contestant.predicted is not None and contestant.predicted.spans:
        starts = _most_similar(starts, sent, contestant.predicted)
    seconds = trace.iteration_seconds()
    lengths = {t: sum(seconds[t - trace.first :][: trace.period]) for t in starts}
    middle = median(lengths.values())

    def seconds_recorded(start: int) -> float:
        """Return the length of the recorded iterations from `start` on."""
        stop = start
        while stop in sent and stop < trace.first + trace.iterations:
            stop += 1
        return sum(seconds[start - trace.first : stop - trace.first])

    def place(start: int) -> tuple[float, bool, float]:
        missing_s = max(0.0, length_s - seconds_recorded(start))
        # Prefer a period with a recorded predecessor, as its messages may reach into the period.
        return missing_s, start - 1 not in sent, abs(lengths[start] - middle)

    return min(starts, key=place)


def _measured_starts(run: Run, rep: Repetition, starts: list[int]) -> list[int]:
    """Return the starts after the skipped iterations, without estimated ones; if any remain."""
    trace = rep.trace
    after = count_skipped(run, rep) + trace.first
    starts = [t for t in starts if t >= after] or starts
    rough = estimated_iterations(trace)
    return [t for t in starts if rough.isdisjoint(range(t, t + trace.period))] or starts


def _recorded_iterations(trace: Trace) -> list[int]:
    return sorted({span.iteration for span in trace.spans})


def _whole_periods(trace: Trace, recorded: Iterable[int]) -> list[int]:
    """Return the iterations at which a whole recorded period begins."""
    ended, known = range(trace.first, trace.first + trace.iterations), set(recorded)
    return [
        t
        for t in sorted(known)
        if all(i in known and i in ended for i in range(t, t + trace.period))
    ]


def _sent_messages(trace: Trace, rank: int) -> dict[int, Counter[Key]]:
    """Return the messages of a rank by recorded iteration."""
    sent: dict[int, Counter[Key]] = {}
    for span in trace.spans:
        if span.rank == rank:
            keys = sent.setdefault(span.iteration, Counter())
            if span.lane != COMPUTE:
                keys[(span.lane, span.kind, span.buckets, _age(span, held_generation(span)))] += 1
    return sent


def _most_similar(starts: list[int], sent: dict[int, Counter[Key]], predicted: Trace) -> list[int]:
    """Return the starts of periods that send the most messages of the predicted period in phase."""
    wanted = _sent_messages(predicted, 0)
    alike = {
        t: sum(
            (sent[t + i] & wanted.get(predicted.first + i, Counter())).total()
            for i in range(predicted.period)
            if t + i in sent
        )
        for t in starts
    }
    return [t for t in starts if alike[t] == max(alike.values())]


def window_of(trace: Trace, iterations: range, length_s: float | None = None) -> Window:
    """Return iterations of a trace as a window, on one clock.

    With `length_s` the window has this length and all iterations that begin in the window, at least
    the first one.
    """
    ranks = range(trace.world_size)
    starts = [start_of(trace, rank, iterations.start) for rank in ranks]
    # Gossip workers have no common iterations: each worker begins its iteration at zero.
    apart = "gossip" in trace.notes
    offsets = starts if apart else clock_offsets(trace)
    zero = min(start - offset for start, offset in zip(starts, offsets, strict=True))
    zeros = tuple(zero + offset for offset in offsets)
    if length_s is None:
        last = iterations.stop - 1 - trace.first
        length_s = max(trace.ends_s[rank][last] - zeros[rank] for rank in ranks)
    else:
        begun = bisect_left(trace.ends_s[0][: trace.iterations], zeros[0] + length_s)
        last = min(begun, trace.iterations - 1) + trace.first
        # Workers of servers do not wait for each other: rank 0 may begin its first one later.
        iterations = range(iterations.start, max(last, iterations.start) + 1)
    return Window(trace, iterations, zeros, length_s, _seen_spans(trace, zeros, length_s))


def clock_offsets(trace: Trace) -> tuple[float, ...]:
    """Return the offset of each rank's clock from rank 0's, in seconds.

    A collective ends on all ranks at about the same time, so the offset is the median difference of
    these ends. Without messages, ends of iterations are used, as where replicas are sharded:
    there a message has only some of the ranks, as has one inside a replica.
    """
    if trace.source == "simulated":
        return (0.0,) * trace.world_size
    nodes = Topology.from_record(trace.notes)
    ends: list[dict[Any, float]] = [{} for _ in range(trace.world_size)]
    for span in trace.spans if nodes is None or not nodes.sharded else ():
        if span.lane != COMPUTE and base_link(span.lane) != INSIDE:
            ends[span.rank][span.iteration, span.lane, span.kind, span.buckets] = span.end_s
    if not all(ends):
        ends = [dict(enumerate(row)) for row in trace.ends_s]
    return tuple(
        median([own[key] - ends[0][key] for key in own.keys() & ends[0].keys()] or [0.0])
        for own in ends
    )


def _seen_spans(trace: Trace, zeros: Sequence[float], length: float) -> dict[int, tuple[Span, ...]]:
    shown: dict[int, list[Span]] = {rank: [] for rank in range(trace.world_size)}
    for span in trace.spans:
        zero = zeros[span.rank]
        if span.start_s < zero + length and span.end_s > max(zero, span.start_s):
            shown[span.rank].append(span)
    return {
        rank: tuple(sorted(spans, key=lambda span: (span.start_s, span.lane)))
        for rank, spans in shown.items()
        if spans  # the simulator records the first ranks only
    }


def _repeat_period(trace: Trace, count: int) -> Trace:
    """Add a copy of a steady period before the period and `count` copies after it."""
    step_s = trace.iteration_s() * trace.period
    copies = [
        shift_span(span, k * trace.period, k * step_s)
        for k in (-1, *range(1, count + 1))
        for span in trace.spans
    ]
    ends_s = tuple(
        tuple(end + k * step_s for k in range(count + 1) for end in ends[: trace.period])
        for ends in trace.ends_s
    )
    return replace(trace, spans=(*trace.spans, *copies), ends_s=ends_s)


def _age(span: Span, generation: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (iterations since the begin of the generation, number of merged iterations)."""
    return generation and (span.iteration - generation[0], generation[1] - generation[0])
