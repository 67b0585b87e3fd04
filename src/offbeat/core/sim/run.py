"""Simulation of a plan on all ranks, with the engine that fits the plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from offbeat.core.derive.fit import fit_faults, size_faults
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import event_engine as events
from offbeat.core.sim import fast_engine as engine
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.fluid import coupled_links
from offbeat.core.sim.job import Factors, Job, Run, Spread
from offbeat.core.sim.outcomes import Outcomes, Votes
from offbeat.core.sim.ranks import Ranks


def run(job: Job) -> Run:
    """Simulate a plan on all ranks; raise ValueError if the plan deadlocks."""
    return engine.run(job) if job.plan.uniform else events.run(job)


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
        horizon += lag if plan.uniform else (lag + 1) * profile.world_size
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
