"""Simulation of plans in virtual time: choice of the engine, and the trace of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from offbeat.core.derive.fit import fit_faults, size_faults
from offbeat.core.derive.windows import Windows
from offbeat.core.plan import INSIDE, Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim import event_engine as events
from offbeat.core.sim import fast_engine as engine
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.fluid import coupled_links
from offbeat.core.sim.job import Factors, Job, Run, Spread
from offbeat.core.sim.outcomes import Outcomes, Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.spans import rank_spans
from offbeat.core.sim.trace import Trace

MAX_RANKS = 16  # largest number of ranks with spans in a trace
LEAST_ITERATIONS = 32  # default of the least number of iterations after the prologue
MOST_ITERATIONS = 2048  # default of the largest number of iterations


def run(job: Job) -> Run:
    """Simulate a plan on all ranks; raise ValueError if the plan deadlocks."""
    return engine.run(job) if is_uniform(job.plan, job.coupled) else events.run(job)


def is_uniform(plan: Plan, coupled: frozenset[str]) -> bool:
    """Return whether one program and one queue per link represent all ranks.

    Messages inside a replica end at other times than those of other replicas, so they cannot slow
    down a link between replicas in one queue.
    """
    return plan.uniform and not any(base_link(name) == INSIDE for name in coupled)


def make_job(
    plan: Plan,
    profile: Profile,
    ranks: Ranks,
    iterations: int,
    seed: int = 0,
    votes: Votes | None = None,
    repeats: Mapping[int, int] | None = None,
    spread: float = 0.0,
) -> Job:
    """Return the input of an engine.

    Args:
        plan: plan to simulate.
        profile: profile of model and network.
        ranks: differences between ranks.
        iterations: number of iterations.
        seed: seed of jitter and votes.
        votes: for a vote by name, the probability of a yes, or its outcomes in a run.
        repeats: number of iterations that a phase represents, by phase; 1 for other phases.
        spread: lower limit of the relative standard deviation of message times.

    Raises:
        ValueError: the plan does not fit the profile.
    """
    if iterations < 1:
        raise ValueError(f"iterations ({iterations}) must be at least 1")
    for words, rules in chain(size_faults(plan, profile), fit_faults(plan, profile)):
        raise ValueError(f"{words}\n{plan.text(mark=rules)}")
    ranks.fit(profile)
    together = coupled_links(plan, profile)
    horizon = iterations
    if together:
        # Simulate the messages that share bandwidth with the last messages too, up to the
        # deadlines of the last messages. In a plan that is not uniform, ranks may be ahead of each
        # other, so a message may in turn share bandwidth with later ones, once per rank.
        lag = max(t.before.lag for t in plan.transfers)
        horizon += lag if is_uniform(plan, together) else (lag + 1) * profile.world_size
    return Job(
        plan,
        profile,
        ranks,
        iterations,
        horizon,
        Costs(plan, profile, ranks),
        Outcomes([vote.name for vote in plan.votes], votes or {}, seed),
        Factors(profile, ranks, horizon, seed),
        Spread(plan, profile, seed, spread),
        together,
        repeats or {},
    )


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
    """Simulate a plan in virtual time.

    Args:
        plan: plan to simulate.
        profile: measured facts of model and network.
        iterations: number of iterations. None for the prologue and at least four periods with at
            least 32 iterations, but at most 2048 iterations in total.
        seed: seed of jitter and votes.
        ranks: differences between ranks; None for those of the profile.
        record: number of last iterations with spans. None for the last whole period, or for the
            last 32 iterations (at most a period's number) if no period is whole.
        votes: for a vote by name, the probability of a yes (default 1), or its outcomes in a run.

    Returns:
        Trace in seconds from 0, with spans of at most the first 16 ranks. A reduce_scatter,
        all_gather or send has its verb as kind; the first two count half the payload bytes. If
        all ranks are alike, the trace has a single row; `notes["ranks"]` is the number of ranks.

    Raises:
        ValueError: the plan does not fit the profile or deadlocks.
    """
    if iterations is None:
        period = max(plan.period, 1)  # `make_job` refuses a smaller one
        periods = max(4, -(-LEAST_ITERATIONS // period))
        iterations = min(plan.prologue + periods * period, MOST_ITERATIONS)
    job = make_job(plan, profile, ranks or Ranks(), iterations, seed, votes)
    window = recorded_iterations(plan, iterations, record)
    return to_trace(run(job), plan, range(iterations), window)


def recorded_iterations(plan: Plan, iterations: int, record: int | None) -> range:
    """Return the iterations with spans: the last `record`, by default the last whole period."""
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
    result: Run,
    plan: Plan,
    covered: range,
    record: range,
    number: Callable[[int], int] = lambda iteration: iteration,
) -> Trace:
    """Convert the result of an engine to a trace.

    Args:
        result: result of an engine.
        plan: plan whose iterations the trace shows; the original if `result` is of a shortened one.
        covered: iterations of `result` in the trace.
        record: iterations of `result` with spans.
        number: function from an iteration of `result` to the iteration of `plan`.
    """
    rows = result.ends_s.shape[1]
    starts_s = result.ends_s[covered.start - 1].tolist() if covered.start else [0.0] * rows
    windows = Windows(plan)
    return Trace(
        source="simulated",
        strategy=plan.strategy,
        ends_s=tuple(map(tuple, result.ends_s[covered.start : covered.stop].T.tolist())),
        starts_s=tuple(starts_s),
        spans=tuple(
            span
            for rank in range(min(rows, MAX_RANKS))
            for span in rank_spans(result, rank, record, number, windows)
        ),
        first=number(covered.start),
        period=plan.period,
        uneven=bool(plan.votes),
        notes={"ranks": result.job.profile.world_size},
    )
