"""Simulation: plans in virtual time, as a trace."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.derive.windows import Windows
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.job import Run
from offbeat.core.sim.outcomes import Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.run import run
from offbeat.core.sim.spans import rank_spans
from offbeat.core.sim.trace import Trace

MAX_RANKS = 16  # ranks with spans in a trace
LEAST_ITERATIONS = 32  # by default, after the prologue
MOST_ITERATIONS = 2048  # by default


def simulate(
    plan: Plan,
    profile: Profile,
    *,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    record: int | None = None,
    votes: Votes | None = None,
) -> Trace:
    """Trace of a plan in virtual time, in seconds from 0.

    `iterations` defaults to the prologue and at least four periods, but at most 2048. Spans cover
    the last `record` iterations (default: the last whole period, or the last 32 if there is none)
    of at most the first 16 ranks; the kind of half an all-reduce is its verb, and its bytes are
    half the payload. `votes`: by name, how probable a yes is (default 1), drawn from `seed`, or the
    outcomes of a run, iteration by iteration. If all ranks are alike, the trace has one row that
    stands for all of them; `notes["ranks"]` is their number. ValueError if the plan does not fit
    the profile or can never proceed.
    """
    if iterations is None:
        iterations = min(default_iterations(plan), MOST_ITERATIONS)
    window = recorded(plan, iterations, record)
    found = run(plan, profile, ranks or Ranks(), iterations=iterations, seed=seed, votes=votes)
    return to_trace(found, plan, range(iterations), window)


def default_iterations(plan: Plan, least: int = LEAST_ITERATIONS) -> int:
    """The prologue, then whole periods: at least four, with at least `least` iterations."""
    return plan.prologue + plan.period * max(4, -(-least // plan.period))


def recorded(plan: Plan, iterations: int, record: int | None) -> range:
    """Iterations with spans: the last `record`, by default the last whole period."""
    if record is None:
        periods = max(iterations - plan.prologue, 0) // plan.period
        if periods:
            start = plan.prologue + (periods - 1) * plan.period
            return range(start, start + plan.period)
        record = min(plan.period, LEAST_ITERATIONS)
    if record < 0:
        raise ValueError(f"record ({record}) must be at least 0")
    return range(max(iterations - record, 0), iterations)


def to_trace(
    found: Run,
    plan: Plan,
    covered: range,
    record: range,
    number: Callable[[int], int] = lambda iteration: iteration,
) -> Trace:
    """What happened in a run of iterations, as a trace with spans of those in `record`. `plan`
    and `number` say whose iterations they are, and which."""
    rows = found.ends_s.shape[1]
    starts_s = found.ends_s[covered.start - 1].tolist() if covered.start else [0.0] * rows
    windows = Windows(plan)
    return Trace(
        source="simulated",
        strategy=plan.strategy,
        ends_s=tuple(map(tuple, found.ends_s[covered.start : covered.stop].T.tolist())),
        starts_s=tuple(starts_s),
        spans=tuple(
            span
            for rank in range(min(rows, MAX_RANKS))
            for span in rank_spans(found, rank, record, number, windows)
        ),
        first=number(covered.start),
        period=plan.period,
        uneven=bool(plan.votes),
        notes={"ranks": found.job.profile.world_size},
    )
