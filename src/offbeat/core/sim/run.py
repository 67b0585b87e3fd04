"""Running: a plan in virtual time on all ranks, by the engine that suits it."""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import event_engine as events
from offbeat.core.sim import fast_engine as engine
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.job import Factors, Job, Run
from offbeat.core.sim.outcomes import Outcomes, Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.refuse import refuse
from offbeat.core.sim.shared import coupled
from offbeat.core.sim.spread import Spread


def run(
    plan: Plan,
    profile: Profile,
    ranks: Ranks,
    *,
    iterations: int,
    seed: int = 0,
    votes: Votes | None = None,
    repeats: Mapping[int, int] | None = None,
    spread: float = 0.0,
) -> Run:
    """Run a plan on all ranks; ValueError if it does not fit the profile or can never proceed.

    `votes`: of a yes by name, its probability or the outcomes of a run. `repeats`: iterations that
    a phase stands for. `spread`: messages vary by at least this share.
    """
    job = job_of(plan, profile, ranks, iterations, seed, votes or {}, repeats or {}, spread)
    return engine.run(job) if plan.uniform else events.run(job)


def job_of(
    plan: Plan,
    profile: Profile,
    ranks: Ranks,
    iterations: int,
    seed: int,
    votes: Votes,
    repeats: Mapping[int, int],
    spread: float = 0.0,
) -> Job:
    """What either engine is given."""
    if iterations < 1:
        raise ValueError(f"iterations ({iterations}) must be at least 1")
    refuse(plan, profile)
    ranks.fit(profile)
    together = coupled(plan, profile)
    horizon = iterations
    if together:
        # What shares the time of the last messages must run, too: until each rank is past their
        # deadlines, and in turn past those of what shares the time of these. Some ranks may be
        # ahead of others.
        lag = max(t.before.lag for t in plan.transfers)
        horizon += lag if plan.uniform else (lag + 1) * profile.world_size
    return Job(
        plan,
        profile,
        ranks,
        iterations,
        horizon,
        Costs(plan, profile, ranks),
        Outcomes([vote.name for vote in plan.votes], votes, seed),
        Factors(profile, ranks, horizon, seed),
        Spread(plan, profile, seed, spread),
        together,
        repeats,
    )
