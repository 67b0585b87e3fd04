"""Simulation: plans in virtual time, as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from offbeat.plan import Plan, Transfer
from offbeat.profile import Profile
from offbeat.sim.engine import Run, run
from offbeat.sim.group import Group, Release, Times
from offbeat.sim.program import message_bytes
from offbeat.sim.ranks import Ranks
from offbeat.trace import COMPUTE, Span, Trace

MAX_RANKS = 16  # ranks with spans in a trace
LEAST_ITERATIONS = 32  # by default, after the prologue


def simulate(
    plans: Plan | Sequence[Plan],
    profile: Profile,
    *,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    record: int | None = None,
) -> Trace:
    """Trace of a plan (or of one plan per rank) in virtual time, in seconds from 0.

    `iterations` defaults to the prologue and at least four periods. Spans cover the last `record`
    iterations (default: the last whole period) of at most the first 16 ranks; the kind of half an
    all-reduce is its verb, and its bytes are half the payload. If all ranks are
    alike, the trace has one row that stands for all of them; `notes["ranks"]` is their number.
    ValueError if the plans do not fit the profile, disagree, or can never proceed.
    """
    plans = as_plans(plans)
    if iterations is None:
        iterations = default_iterations(plans[0])
    window = recorded(plans[0], iterations, record)
    result = run(plans, profile, ranks or Ranks(), iterations=iterations, seed=seed, record=window)
    return to_trace(plans[0], profile, result, range(iterations))


def as_plans(plans: Plan | Sequence[Plan]) -> Sequence[Plan]:
    """One plan as a sequence; ValueError if there is none."""
    plans = [plans] if isinstance(plans, Plan) else plans
    if not plans:
        raise ValueError("plans ([]) must not be empty")
    return plans


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
        record = plan.period
    if record < 0:
        raise ValueError(f"record ({record}) must be at least 0")
    return range(max(iterations - record, 0), iterations)


def to_trace(plan: Plan, profile: Profile, result: Run, covered: range) -> Trace:
    """What happened in a run of iterations, as a trace."""
    rows = result.ends_s.shape[1]
    starts_s = result.ends_s[covered.start - 1].tolist() if covered.start else [0.0] * rows
    spans = [span for group in result.groups for span in _spans(group, result)]
    return Trace(
        source="simulated",
        strategy=plan.strategy,
        ends_s=tuple(map(tuple, result.ends_s[covered.start : covered.stop].T.tolist())),
        starts_s=tuple(starts_s),
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_s))),
        first=covered.start,
        period=plan.period,
        notes={"ranks": profile.world_size},
    )


def _spans(group: Group, result: Run) -> Iterator[Span]:
    rows = range(min(result.ends_s.shape[1], MAX_RANKS))
    places = [(i, rank) for i, rank in enumerate(group.ranks) if rank in rows]
    for kind, iteration, bucket, start, end in group.work:
        buckets = None if bucket is None else (bucket, bucket + 1)
        for i, rank in places:
            start_s, end_s = _pick(start, i), _pick(end, i)
            # A bucket's work is always shown; waiting and other work only if there was some.
            if end_s > start_s or buckets:
                yield Span(rank, COMPUTE, kind, iteration, start_s, end_s, buckets)
    yield from _messages(group, result, places)


def _messages(group: Group, result: Run, places: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """A message's span on a rank begins when the rank issues it, before the others may have."""
    program, plan = group.program, group.program.plan
    for name, iteration, position, at in sorted(group.releases, key=_issue_order):
        t = program.queues[name, plan.phase(iteration)][position]
        link = result.links[name]
        end_s = link.arrival_s(iteration, position)
        if end_s is None:
            continue
        kind = t.payload.kind if t.verb == "mean" else t.verb
        buckets = (t.payload.buckets.start, t.payload.buckets.stop)
        size, carries = message_bytes(t, program.profile), _carries(plan, t, iteration)
        free_s = link.free_s(iteration, position)
        for i, rank in places:
            start_s = max(_pick(at, i), free_s)
            yield Span(rank, name, kind, iteration, start_s, end_s, buckets, size, carries)


def _carries(plan: Plan, t: Transfer, iteration: int) -> tuple[int, int] | None:
    """Iterations [first, stop) whose merged gradients a message holds; None: just its own."""
    if plan.closes is None or t.payload.kind != "grad":
        return None
    generation = plan.generation(iteration, t.payload.age)
    return generation.start, generation.stop


def _issue_order(release: Release) -> tuple[int, int]:
    return release.iteration, release.position


def _pick(times: Times, i: int) -> float:
    """One rank's time."""
    return float(times[i]) if isinstance(times, np.ndarray) else times
