"""One period of a trace, chosen to be typical and packed for the page.

A page holds hundreds of thousands of spans at worst, so a span is four small integers: index of
its name, iteration within the period, start since the previous span's start, duration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from offbeat.core.plan import CHANNEL, base_link
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.record.run_directory import Contestant, Repetition, Run, count_skipped
from offbeat.experiments.report.generations import Generation, Generations, held_generation

MOST_SPANS = 60_000  # in one page; beyond, ranks and then iterations are left out and named
TICKS = 100_000  # resolution of a window

Key = tuple[str, str, tuple[int, int] | None, tuple[int, int] | None]


@dataclass(frozen=True)
class Window:
    """Some iterations of a trace: `zero_s[rank]` is where they begin, `length_s` how long.

    `shown` holds, for each rank that is shown, every span seen between zero and the end, in
    order of start: also of the neighbouring iterations, whose messages reach into these.
    """

    trace: Trace
    iterations: range
    zero_s: tuple[float, ...]
    length_s: float
    shown: Mapping[int, tuple[Span, ...]]

    @property
    def size(self) -> int:
        """Number of spans shown."""
        return sum(map(len, self.shown.values()))

    @property
    def stands_for_all(self) -> bool:
        """True if the only row stands for every rank: all are alike in a simulation."""
        return self.trace.world_size == 1 and self.trace.notes.get("ranks", 1) > 1

    @property
    def generations(self) -> Generations:
        """What its messages hold if gradients of several iterations can be seen under way in one;
        else none, as telling them apart would say nothing."""
        found = Generations.from_spans(self.trace.spans)
        return found if found.late or self._has_late_messages() else Generations()

    def _has_late_messages(self) -> bool:
        """Whether a message with gradients lasts beyond the end of its iteration."""
        before = self.iterations.start - 1
        for rank, spans in self.shown.items():
            late = self.zero_s[rank] + self.length_s / TICKS
            ends = [late + end for end in self.bounds_s(rank)]
            sent = [s for s in spans if held_generation(s) and s.iteration < self.iterations.stop]
            if any(s.end_s > ends[max(0, s.iteration - before)] for s in sent):
                return True
        return False

    def bounds_s(self, rank: int) -> list[float]:
        """Where the rank's iterations begin, and where the last one ends, from zero."""
        first = self.iterations.start
        edges = [start_of(self.trace, rank, first)]
        edges += [self.trace.ends_s[rank][i - self.trace.first] for i in self.iterations]
        return [edge - self.zero_s[rank] for edge in edges]


def measured_window(run: Run, contestant: Contestant) -> tuple[Repetition, Window] | None:
    """The typical recorded period of the first complete repetition, None without spans.

    Typical: its iterations send what the predicted ones send, and among those periods its
    duration is nearest to the median.
    """
    for rep in contestant.complete:
        start = _typical_start(run, contestant, rep)
        if start is not None:
            period = range(start, start + rep.trace.period)
            return rep, window_of(_merged_trace(rep), period)
    return None


def predicted_window(contestant: Contestant) -> Window | None:
    """The simulated period; what crosses its end also enters at its beginning."""
    trace = contestant.predicted
    if trace is None or not trace.spans or trace.iterations < trace.period:
        return None
    # A simulation may have kept the spans of its last iterations only.
    start = max(trace.first, min(span.iteration for span in trace.spans))
    period = range(start, start + trace.period)
    if trace.iterations == trace.period:
        trace = _repeat_period(trace)
    return window_of(trace, period)


def estimated_iterations(trace: Trace) -> set[int]:
    """Return the iterations of which it is only estimated how long backward waited."""
    return set(trace.notes.get("estimated", ()))


def start_of(trace: Trace, rank: int, iteration: int) -> float:
    """When the rank began an iteration."""
    index = iteration - trace.first
    return trace.ends_s[rank][index - 1] if index else trace.starts_s[rank]


def pack(window: Window, lanes: Sequence[str]) -> dict[str, Any]:
    """JSON-ready form of a window; equal ranks are stored once."""
    unit = 10.0 ** math.floor(math.log10(max(window.length_s, 1e-6) / TICKS))
    generations = window.generations
    names: dict[tuple[Any, ...], int] = {}
    stored: dict[tuple[int, ...], int] = {}
    which = []
    for rank in window.shown:
        rows = tuple(_rows(window, rank, lanes, generations, names, unit))
        which.append(stored.setdefault(rows, len(stored)))
    return {
        "unit_s": unit,
        "length": round(window.length_s / unit),
        "first": window.iterations.start,
        "iterations": len(window.iterations),
        "ranks": list(window.shown),
        "stands_for_all": window.stands_for_all,
        "which": which,
        "names": [list(name) for name in names],
        "rows": [list(rows) for rows in stored],
        "generations": [(*g, colour) for g, colour in _shown_colours(window, generations).items()],
        "bounds": [[round(s / unit) for s in window.bounds_s(rank)] for rank in window.shown],
    }


def shrink(windows: Sequence[Window | None], most: int = MOST_SPANS) -> tuple[list[Any], list[str]]:
    """The windows with few enough spans for one page, and words about what was left out."""
    total = sum(w.size for w in windows if w)
    if total <= most:
        return list(windows), []
    count = max(len(w.shown) for w in windows if w)
    kept = max(1, count * most // total)
    said = [f"Timelines show {kept} of {count} ranks, to keep the page small."]
    fewer = [w and replace(w, shown=_select_ranks(w.shown, kept)) for w in windows]
    total = sum(w.size for w in fewer if w)
    if total > most:
        fewer = [w and _shorten(w, max(1, len(w.iterations) * most // total)) for w in fewer]
        said.append("Timelines show the first iterations of each period, to keep the page small.")
    return fewer, said


def lanes_of(windows: Iterable[Window | None], links: Iterable[str]) -> list[str]:
    """Compute first, then the links in the order of the profile, each with its channels, then
    any other lane."""
    used = {span.lane for w in windows if w for spans in w.shown.values() for span in spans}
    order = [COMPUTE, *links]

    def place(lane: str) -> tuple[int, str, int, str]:
        base = base_link(lane)
        return order.index(base) if base in order else len(order), base, len(lane), lane

    return sorted(used | {COMPUTE}, key=place)


def lane_name(lane: str) -> str:
    """A lane in words: 'net', 'net, channel 2'."""
    base, _, index = lane.partition(CHANNEL)
    return f"{base}, channel {int(index) + 1}" if index.isdecimal() else lane


def _typical_start(run: Run, contestant: Contestant, rep: Repetition) -> int | None:
    trace = rep.trace
    sent = _sent_messages(trace, rep.ranks[0].rank)
    starts = _whole_periods(trace, sent)
    after = count_skipped(run, rep) + trace.first
    starts = [t for t in starts if t >= after] or starts
    rough = estimated_iterations(trace)
    starts = [t for t in starts if rough.isdisjoint(range(t, t + trace.period))] or starts
    if not starts:
        return None
    if contestant.predicted is not None and contestant.predicted.spans:
        starts = _most_similar(starts, sent, contestant.predicted)
    seconds = trace.iteration_seconds()
    lengths = {t: sum(seconds[t - trace.first :][: trace.period]) for t in starts}
    middle = median(lengths.values())
    # Better one whose predecessor is recorded too, as its messages may reach in.
    return min(starts, key=lambda t: (t - 1 not in sent, abs(lengths[t] - middle)))


def _whole_periods(trace: Trace, recorded: dict[int, Counter[Key]]) -> list[int]:
    """Iterations at which a whole recorded period begins."""
    ended = range(trace.first, trace.first + trace.iterations)
    return [
        t for t in recorded if all(i in recorded and i in ended for i in range(t, t + trace.period))
    ]


def _sent_messages(trace: Trace, rank: int) -> dict[int, Counter[Key]]:
    """What the rank sent in every recorded iteration."""
    sent: dict[int, Counter[Key]] = {}
    for span in trace.spans:
        if span.rank == rank:
            keys = sent.setdefault(span.iteration, Counter())
            if span.lane != COMPUTE:
                keys[(span.lane, span.kind, span.buckets, _age(span, held_generation(span)))] += 1
    return sent


def _most_similar(starts: list[int], sent: dict[int, Counter[Key]], predicted: Trace) -> list[int]:
    """The starts of the periods that send most of what the predicted period sends, in phase."""
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


def _merged_trace(rep: Repetition) -> Trace:
    """The merged trace; asserts that row r of `ends_s` is rank r, as every rank is there."""
    assert [record.rank for record in rep.ranks] == list(range(len(rep.ranks)))
    return rep.trace


def window_of(trace: Trace, iterations: range) -> Window:
    """Some iterations of a trace, on one clock."""
    ranks = range(trace.world_size)
    starts = [start_of(trace, rank, iterations.start) for rank in ranks]
    last = iterations.stop - 1 - trace.first
    ends = [trace.ends_s[rank][last] for rank in ranks]
    # In gossip nobody waits for anybody: each begins its own iteration at zero.
    apart = "gossip" in trace.notes
    offsets = starts if apart else clock_offsets(trace)
    zero = min(start - offset for start, offset in zip(starts, offsets, strict=True))
    length = max(end - offset for end, offset in zip(ends, offsets, strict=True)) - zero
    zeros = tuple(zero + offset for offset in offsets)
    return Window(trace, iterations, zeros, length, _seen_spans(trace, zeros, length))


def clock_offsets(trace: Trace) -> tuple[float, ...]:
    """What to subtract from each rank's times to compare them with rank 0's.

    Ranks measure from origins of their own. A collective ends everywhere at about the same time,
    so the median difference of those ends is the offset; without messages, iterations end alike.
    """
    if trace.source == "simulated":
        return (0.0,) * trace.world_size
    ends: list[dict[Any, float]] = [{} for _ in range(trace.world_size)]
    for span in trace.spans:
        if span.lane != COMPUTE:
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


def _repeat_period(trace: Trace) -> Trace:
    """One steady period with a copy of its spans before and one after it."""
    step_s = trace.iteration_s() * trace.period
    copies = [
        replace(
            span,
            start_s=span.start_s + k * step_s,
            end_s=span.end_s + k * step_s,
            iteration=span.iteration + k * trace.period,
            carries=_shift_iterations(span.carries, k * trace.period),
        )
        for k in (-1, 1)
        for span in trace.spans
    ]
    return replace(trace, spans=(*trace.spans, *copies))


def _shift_iterations(carries: tuple[int, int] | None, iterations: int) -> tuple[int, int] | None:
    return carries and (carries[0] + iterations, carries[1] + iterations)


def _rows(
    window: Window,
    rank: int,
    lanes: Sequence[str],
    generations: Generations,
    names: dict[tuple[Any, ...], int],
    unit: float,
) -> Iterable[int]:
    previous = 0
    for span in window.shown[rank]:
        what = (lanes.index(span.lane), span.kind, *(span.buckets or (-1, -1)), span.bytes)
        name = (*what, *(_age(span, generations.generation_of(span)) or (0, 0)))
        start = round((span.start_s - window.zero_s[rank]) / unit)
        yield names.setdefault(name, len(names))
        yield span.iteration - window.iterations.start
        yield start - previous
        yield round((span.end_s - span.start_s) / unit)
        previous = start


def _age(span: Span, generation: Generation | None) -> tuple[int, int] | None:
    """A generation as seen from a span's iteration: how far back it begins, how many it merges."""
    return generation and (span.iteration - generation[0], generation[1] - generation[0])


def _shown_colours(window: Window, generations: Generations) -> dict[Generation, int]:
    """Colours of the generations that the window shows: in messages and updates, or as its own."""
    held = {generations.generation_of(span) for spans in window.shown.values() for span in spans}
    own = window.iterations
    colours = generations.colours(own.start)
    return {
        g: colour
        for g, colour in colours.items()
        if g in held or (g[0] < own.stop and own.start < g[1])
    }


def _select_ranks(shown: Mapping[int, tuple[Span, ...]], count: int) -> dict[int, tuple[Span, ...]]:
    """`count` ranks at equal distances, the first among them."""
    ranks, count = list(shown), min(count, len(shown))
    return {rank: shown[rank] for rank in (ranks[i * len(ranks) // count] for i in range(count))}


def _shorten(window: Window, iterations: int) -> Window:
    """The window's first iterations, the same ranks."""
    less = window_of(window.trace, window.iterations[:iterations])
    return replace(less, shown={rank: less.shown[rank] for rank in window.shown})
