"""Simulated time of a rehearsal: the plans that ran, with the outcomes of their votes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from offbeat.core.profile import Profile
from offbeat.core.sim import Prediction, predict, simulate
from offbeat.core.sim.simulation import MAX_RANKS
from offbeat.core.sim.trace import Span, Trace, shift_span
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.rehearsal.job import Run

PERIODS = 3  # last periods whose spans are kept


@dataclass(frozen=True)
class Clock:
    """Simulated time of a rehearsal.

    Attributes:
        trace: timeline of the whole rehearsal, with the spans of the last iterations. A trace with
            a single row is that of every rank.
        prediction: predicted steady state of the last plan, with its votes.
        sizes: ranks of each replica; empty for one rank each.
    """

    trace: Trace
    prediction: Prediction
    sizes: tuple[int, ...] = ()

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Return the end of each iteration on the slowest rank, in seconds from the start."""
        return tuple(max(ends) for ends in zip(*self.trace.ends_s, strict=False))

    def ends_of(self, rank: int) -> tuple[float, ...]:
        """Return the end of each iteration on one rank, in seconds from the start."""
        return self.trace.ends_s[min(self._replica_of(rank), len(self.trace.ends_s) - 1)]

    def spans_of(self, rank: int) -> list[Span]:
        """Return the spans of one rank; none for ranks whose spans the simulation leaves out."""
        replica = self._replica_of(rank)
        if len(self.trace.ends_s) == 1:
            shown = self.trace.spans if rank < MAX_RANKS else ()
        else:
            shown = [span for span in self.trace.spans if span.rank == replica]
        return [replace(span, rank=rank) for span in shown]

    def _replica_of(self, rank: int) -> int:
        """Return the replica of a rank, whose row of the trace is that of all its ranks."""
        return bisect(list(accumulate(self.sizes)), rank) if self.sizes else rank


def simulate_run(run: Run, strategy: Strategy, profile: Profile, *, seed: int = 0) -> Clock:
    """Return the simulated time of a rehearsal.

    Args:
        run: result of the rehearsal.
        strategy: strategy of the rehearsal.
        profile: profile of the job.
        seed: seed of the jitter.
    """
    courses, log = run.courses, run.logs[0]
    there = planned(strategy).participants(profile)
    iterations = len(log.losses)
    parts: list[Trace] = []
    votes: Mapping[str, list[bool]] = {}
    for course, following in pairwise([*courses, None]):
        assert course is not None
        stop = iterations if following is None else min(following.first, iterations)
        if stop <= course.first:
            continue
        votes = log.outcomes(course, stop)
        trace = simulate(
            course.plan,
            there,
            iterations=stop - course.first,
            seed=seed,
            record=min(PERIODS * course.plan.period, stop - course.first),
            votes=votes,
        )
        parts.append(trace)
    prediction = predict(strategy, profile, seed=seed, votes=votes or None, ran=courses[-1].plan)
    return Clock(_join_traces(parts), prediction, there.topology)


def _join_traces(parts: Sequence[Trace]) -> Trace:
    """Return traces one after the other, with the spans of the last one."""
    ends_s = [list(row) for row in parts[0].ends_s]
    for part in parts[1:]:
        rows = max(len(ends_s), len(part.ends_s))
        before = [ends_s[min(r, len(ends_s) - 1)] for r in range(rows)]
        after = [part.ends_s[min(r, len(part.ends_s) - 1)] for r in range(rows)]
        start_s = max(row[-1] for row in before)
        ends_s = [[*b, *(start_s + s for s in a)] for b, a in zip(before, after, strict=True)]
    last, count = parts[-1], sum(part.iterations for part in parts)
    shift, shift_s = count - last.iterations, max(map(max, ends_s)) - max(map(max, last.ends_s))
    spans = tuple(shift_span(span, shift, shift_s) for span in last.spans)
    return replace(last, ends_s=tuple(map(tuple, ends_s)), spans=spans)
