"""Timeline of one typical period of a trace, packed for the page.

A page can hold hundreds of thousands of spans, so a span is packed into four small integers: index
of its name, iteration within the period, start relative to the previous span, and duration.
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

MOST_SPANS = 60_000  # spans of one page; above this, ranks and then iterations are left out
TICKS = 100_000  # resolution of a window

Key = tuple[str, str, tuple[int, int] | None, tuple[int, int] | None]


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
    def size(self) -> int:
        """Number of spans shown."""
        return sum(map(len, self.shown.values()))

    @property
    def stands_for_all(self) -> bool:
        """Whether one simulated row represents all ranks."""
        return self.trace.world_size == 1 and self.trace.notes.get("ranks", 1) > 1

    @property
    def generations(self) -> Generations:
        """Generations of the window's messages.

        Empty if each message finishes in the iteration of its gradients, as colours would then
        carry no information.
        """
        found = Generations.from_spans(self.trace.spans)
        return found if found.late or self._has_late_messages() else Generations()

    def _has_late_messages(self) -> bool:
        """Whether a message with gradients ends after its iteration."""
        before = self.iterations.start - 1
        for rank, spans in self.shown.items():
            late = self.zero_s[rank] + self.length_s / TICKS
            ends = [late + end for end in self.bounds_s(rank)]
            sent = [s for s in spans if held_generation(s) and s.iteration < self.iterations.stop]
            if any(s.end_s > ends[max(0, s.iteration - before)] for s in sent):
                return True
        return False

    def bounds_s(self, rank: int) -> list[float]:
        """Return the begins of the rank's iterations and the end of the last one, from `zero_s`."""
        first = self.iterations.start
        edges = [start_of(self.trace, rank, first)]
        edges += [self.trace.ends_s[rank][i - self.trace.first] for i in self.iterations]
        return [edge - self.zero_s[rank] for edge in edges]


def measured_window(run: Run, contestant: Contestant) -> tuple[Repetition, Window] | None:
    """Return a typical recorded period of the first complete repetition; None without spans.

    The typical period sends most of the predicted messages. Among several such periods, it is the
    one with a duration nearest to their median.
    """
    for rep in contestant.complete:
        start = _typical_start(run, contestant, rep)
        if start is not None:
            period = range(start, start + rep.trace.period)
            # Row r of the merged trace's `ends_s` is rank r.
            assert [record.rank for record in rep.ranks] == list(range(len(rep.ranks)))
            return rep, window_of(rep.trace, period)
    return None


def predicted_window(contestant: Contestant) -> Window | None:
    """Return the simulated period. A message that crosses its end also enters at its begin."""
    trace = contestant.predicted
    if trace is None or not trace.spans or trace.iterations < trace.period:
        return None
    # A simulation may keep the spans of its last iterations only.
    start = max(trace.first, min(span.iteration for span in trace.spans))
    period = range(start, start + trace.period)
    if trace.iterations == trace.period:
        trace = _repeat_period(trace)
    return window_of(trace, period)


def estimated_iterations(trace: Trace) -> set[int]:
    """Return the iterations whose waits in backward are estimated."""
    return set(trace.notes.get("estimated", ()))


def start_of(trace: Trace, rank: int, iteration: int) -> float:
    """Return the begin of an iteration on a rank, in seconds."""
    index = iteration - trace.first
    return trace.ends_s[rank][index - 1] if index else trace.starts_s[rank]


def pack(window: Window, lanes: Sequence[str]) -> dict[str, Any]:
    """Return a window in JSON form. Ranks with equal spans are stored once."""
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
    """Reduce windows to `most` spans; return them with sentences about the reduction."""
    total = sum(w.size for w in windows if w)
    if total <= most:
        return list(windows), []
    count = max(len(w.shown) for w in windows if w)
    kept = max(1, count * most // total)
    notes = [f"Timelines show {kept} of {count} ranks, to keep the page small."]
    fewer = [w and replace(w, shown=_select_ranks(w.shown, kept)) for w in windows]
    total = sum(w.size for w in fewer if w)
    if total > most:
        fewer = [w and _shorten(w, max(1, len(w.iterations) * most // total)) for w in fewer]
        notes.append("Timelines show the first iterations of each period, to keep the page small.")
    return fewer, notes


def lanes_of(windows: Iterable[Window | None], links: Iterable[str]) -> list[str]:
    """Return the lanes: compute, the links in order of the profile with channels, then others."""
    used = {span.lane for w in windows if w for spans in w.shown.values() for span in spans}
    order = [COMPUTE, *links]

    def place(lane: str) -> tuple[int, str, int, str]:
        base = base_link(lane)
        return order.index(base) if base in order else len(order), base, len(lane), lane

    return sorted(used | {COMPUTE}, key=place)


def lane_name(lane: str) -> str:
    """Return the display name of a lane: 'net', 'net, channel 2'."""
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
    # Prefer a period with a recorded predecessor, as its messages may reach into the period.
    return min(starts, key=lambda t: (t - 1 not in sent, abs(lengths[t] - middle)))


def _whole_periods(trace: Trace, recorded: dict[int, Counter[Key]]) -> list[int]:
    """Return the iterations at which a whole recorded period begins."""
    ended = range(trace.first, trace.first + trace.iterations)
    return [
        t for t in recorded if all(i in recorded and i in ended for i in range(t, t + trace.period))
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


def window_of(trace: Trace, iterations: range) -> Window:
    """Return iterations of a trace as a window, on one clock."""
    ranks = range(trace.world_size)
    starts = [start_of(trace, rank, iterations.start) for rank in ranks]
    last = iterations.stop - 1 - trace.first
    ends = [trace.ends_s[rank][last] for rank in ranks]
    # Gossip workers have no common iterations: each worker begins its iteration at zero.
    apart = "gossip" in trace.notes
    offsets = starts if apart else clock_offsets(trace)
    zero = min(start - offset for start, offset in zip(starts, offsets, strict=True))
    length = max(end - offset for end, offset in zip(ends, offsets, strict=True)) - zero
    zeros = tuple(zero + offset for offset in offsets)
    return Window(trace, iterations, zeros, length, _seen_spans(trace, zeros, length))


def clock_offsets(trace: Trace) -> tuple[float, ...]:
    """Return the offset of each rank's clock from rank 0's, in seconds.

    A collective ends on all ranks at about the same time, so the offset is the median difference of
    these ends. Without messages, ends of iterations are used.
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
    """Add copies of the spans of a steady period before and after the period."""
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
    """Return (iterations since the begin of the generation, number of merged iterations)."""
    return generation and (span.iteration - generation[0], generation[1] - generation[0])


def _shown_colours(window: Window, generations: Generations) -> dict[Generation, int]:
    """Return colours of generations in the window's spans or that contain its iterations."""
    held = {generations.generation_of(span) for spans in window.shown.values() for span in spans}
    own = window.iterations
    colours = generations.colours(own.start)
    return {
        g: colour
        for g, colour in colours.items()
        if g in held or (g[0] < own.stop and own.start < g[1])
    }


def _select_ranks(shown: Mapping[int, tuple[Span, ...]], count: int) -> dict[int, tuple[Span, ...]]:
    """Return `count` evenly spaced ranks with the first one."""
    ranks, count = list(shown), min(count, len(shown))
    return {rank: shown[rank] for rank in (ranks[i * len(ranks) // count] for i in range(count))}


def _shorten(window: Window, iterations: int) -> Window:
    """Return the first iterations of a window, with the same ranks."""
    less = window_of(window.trace, window.iterations[:iterations])
    return replace(less, shown={rank: less.shown[rank] for rank in window.shown})
