"""How evenly ranks send over an iteration, measured and predicted, of a comparison's run.

    python benchmarks/link_load.py RUN_DIR

Time steps are an iteration / 2N long. Of each contestant the link whose largest step is furthest
above its mean, and the rate at which the largest step of any link is sent.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.core.plan import INSIDE, base_link
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.run_directory import count_skipped
from offbeat.experiments.report import Run, load
from offbeat.experiments.report.breakdown import group_by_message


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Bytes that one rank sends over one link in each time step of a period.

    Attributes:
        rank: the sending rank.
        link: name of the link.
        step_s: length of a time step in seconds.
        step_bytes: bytes of each step.
    """

    rank: int
    link: str
    step_s: float
    step_bytes: tuple[float, ...]

    @property
    def unevenness(self) -> float:
        """Bytes of the largest step over the mean of all steps; 1 without traffic."""
        total = sum(self.step_bytes)
        return max(self.step_bytes) * len(self.step_bytes) / total if total else 1.0

    @property
    def peak_bytes_per_s(self) -> float:
        """Rate of the largest step, in bytes per second."""
        return max(self.step_bytes) / self.step_s


def link_loads(trace: Trace, skip: int = 0) -> list[LinkLoad]:
    """Return the load of each rank's outgoing links in a trace.

    Recorded whole periods are averaged. A message is sent at a constant rate from the arrival of
    its last rank until its end. An all-reduce is a ring: each rank sends 2(N-1)/N of its bytes, for
    the N ranks of a message, which are those of a node or of a column where replicas have several
    ranks. If one simulated row represents all ranks, so does one load per link.

    Args:
        trace: measured or predicted trace.
        skip: first iteration that is counted.

    Returns:
        Loads in steps of 1/2N of an iteration for N ranks, with the channels of a link merged.
        Empty if the trace holds no message of a whole period.
    """
    counted = _whole_periods(trace, skip)
    messages = [s for s in trace.spans if s.lane != COMPUTE and s.iteration in counted]
    period_s = trace.period * _iteration_s(trace, counted)
    if not messages or not period_s:
        return []
    world_size = int(trace.notes.get("ranks", trace.world_size))
    nodes = Topology.from_record(trace.notes)
    periods = len(counted) // trace.period
    steps = 2 * world_size * trace.period
    sent: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * steps)
    for same in group_by_message(messages, nodes):
        begin_s = max(span.start_s for span in same)
        for span in same:
            if span.way is not None and span.rank != span.way[0]:
                continue
            count = world_size if nodes is None else _ring_size(span, nodes)
            share = 1.0 if span.way is not None else 2 * (count - 1) / count
            # A send may return before the last bytes have arrived.
            end_s = max(s.end_s for s in same) if span.way is not None else span.end_s
            into = sent[span.rank, base_link(span.lane)]
            _add_bytes(into, span.bytes * share / periods, begin_s, end_s, period_s)
    return [
        LinkLoad(rank, link, period_s / steps, tuple(step_bytes))
        for (rank, link), step_bytes in sorted(sent.items())
    ]


def _whole_periods(trace: Trace, skip: int) -> set[int]:
    """Return the last recorded iterations that form whole periods with all their messages."""
    recorded = sorted({span.iteration for span in trace.spans if span.iteration >= skip})
    counts = Counter(span.iteration for span in trace.spans if span.lane != COMPUTE)
    if not trace.uneven:
        # Messages in transfer at the end of a run have no span.
        while (
            recorded[trace.period :] and counts[recorded[-1]] < counts[recorded[-1 - trace.period]]
        ):
            recorded.pop()
    whole = len(recorded) // trace.period * trace.period
    return set(recorded[len(recorded) - whole :])


def _iteration_s(trace: Trace, iterations: Iterable[int]) -> float:
    """Return mean seconds of the finished ones among some iterations; 0 if none is finished."""
    seconds = dict(enumerate(trace.iteration_seconds(), trace.first))
    ended = [seconds[i] for i in iterations if i in seconds]
    return sum(ended) / len(ended) if ended else 0.0


def _ring_size(span: Span, nodes: Topology) -> int:
    """Return the number of ranks in the ring of a message."""
    inside = base_link(span.lane) == INSIDE
    return len(nodes.node_of(span.rank)) if inside else nodes.replicas


def _add_bytes(
    into: list[float], size_bytes: float, begin_s: float, end_s: float, period_s: float
) -> None:
    """Distribute bytes evenly over the steps between two times, modulo the period."""
    step_s = period_s / len(into)
    first, last = begin_s / step_s, end_s / step_s  # in steps
    if last <= first:
        into[int(first) % len(into)] += size_bytes
        return
    for step in range(int(first), int(last) + 1):
        share = max(0.0, min(step + 1, last) - max(step, first)) / (last - first)
        into[step % len(into)] += size_bytes * share


def table(run: Run) -> str:
    """Markdown, a row per contestant."""
    lines = [
        "| strategy | largest/mean, measured | predicted | peak Mbit/s, measured | predicted |",
        "|---|---|---|---|---|",
    ]
    for contestant in run.contestants:
        measured = [
            x for rep in contestant.complete for x in link_loads(rep.trace, count_skipped(run, rep))
        ]
        predicted = link_loads(contestant.predicted) if contestant.predicted else []
        pairs = [_worst(measured), _worst(predicted)]
        cells = [pair[kind] for kind in (0, 1) for pair in pairs]
        lines.append(f"| {contestant.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _worst(loads: list[LinkLoad]) -> tuple[str, str]:
    if not loads:
        return "", ""
    uneven = max(x.unevenness for x in loads)
    peak = max(x.peak_bytes_per_s for x in loads)
    return f"{uneven:.2f}", f"{peak * 8e-6:.1f}"


if __name__ == "__main__":
    print(table(load(sys.argv[1])))
