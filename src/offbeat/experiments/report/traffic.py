"""Traffic: how evenly over time each rank sends, measured or predicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.core.plan import base_link
from offbeat.core.sim.trace import COMPUTE, Span, Trace


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What one rank sends over one link: bytes in each time step of a period, `step_s` long."""

    rank: int
    link: str
    step_s: float
    step_bytes: tuple[float, ...]

    @property
    def unevenness(self) -> float:
        """The largest step over the mean one; 1 if nothing is sent."""
        total = sum(self.step_bytes)
        return max(self.step_bytes) * len(self.step_bytes) / total if total else 1.0

    @property
    def peak_bytes_per_s(self) -> float:
        """The rate at which the largest step is sent."""
        return max(self.step_bytes) / self.step_s


def link_loads(trace: Trace, skip: int = 0) -> list[LinkLoad]:
    """Load of every rank's outgoing links (with their channels) in a trace, in steps of an
    iteration / 2N for N ranks; empty if it holds no message of a whole period.

    Whole periods of the recorded iterations are laid over one another, without those before the
    first `skip`. A message is sent evenly from when its last rank has come to it. An all-reduce
    is a ring: each rank sends 2(N-1)/N of its bytes. If one row stands for all ranks, so does one
    load per link.
    """
    counted = _whole_periods(trace, skip)
    messages = [s for s in trace.spans if s.lane != COMPUTE and s.iteration in counted]
    period_s = trace.period * _iteration_s(trace, counted)
    if not messages or not period_s:
        return []
    world_size = int(trace.notes.get("ranks", trace.world_size))
    periods = len(counted) // trace.period
    steps = 2 * world_size * trace.period
    sent: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * steps)
    for same in _group_by_message(messages):
        begin_s = max(span.start_s for span in same)
        for span in same:
            if span.way is not None and span.rank != span.way[0]:
                continue
            share = 1.0 if span.way is not None else 2 * (world_size - 1) / world_size
            # A sender may be done before the last bytes have arrived.
            end_s = max(s.end_s for s in same) if span.way is not None else span.end_s
            into = sent[span.rank, base_link(span.lane)]
            _add_bytes(into, span.bytes * share / periods, begin_s, end_s, period_s)
    return [
        LinkLoad(rank, link, period_s / steps, tuple(step_bytes))
        for (rank, link), step_bytes in sorted(sent.items())
    ]


def _whole_periods(trace: Trace, skip: int) -> set[int]:
    """The last recorded iterations that are whole periods and have all of their messages."""
    recorded = sorted({span.iteration for span in trace.spans if span.iteration >= skip})
    counts = Counter(span.iteration for span in trace.spans if span.lane != COMPUTE)
    if not trace.uneven:
        # What is still under way when a run ends leaves no span.
        while (
            recorded[trace.period :] and counts[recorded[-1]] < counts[recorded[-1 - trace.period]]
        ):
            recorded.pop()
    whole = len(recorded) // trace.period * trace.period
    return set(recorded[len(recorded) - whole :])


def _iteration_s(trace: Trace, iterations: Iterable[int]) -> float:
    """Mean seconds of some neighbouring iterations, 0 if none of them has ended."""
    seconds = dict(enumerate(trace.iteration_seconds(), trace.first))
    ended = [seconds[i] for i in iterations if i in seconds]
    return sum(ended) / len(ended) if ended else 0.0


def _group_by_message(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of each message, one for each of its ranks."""
    found: dict[tuple, list[Span]] = defaultdict(list)
    seen: Counter[tuple] = Counter()
    for span in sorted(spans, key=lambda span: span.start_s):
        key = span.lane, span.iteration, span.kind, span.buckets, span.way
        number = seen[span.rank, key]
        seen[span.rank, key] += 1
        found[*key, number].append(span)
    return [*found.values()]


def _add_bytes(
    into: list[float], size_bytes: float, begin_s: float, end_s: float, period_s: float
) -> None:
    """Add bytes to the steps between two moments, the period beginning anew after its last."""
    step_s = period_s / len(into)
    first, last = begin_s / step_s, end_s / step_s  # in steps
    if last <= first:
        into[int(first) % len(into)] += size_bytes
        return
    for step in range(int(first), int(last) + 1):
        share = max(0.0, min(step + 1, last) - max(step, first)) / (last - first)
        into[step % len(into)] += size_bytes * share
