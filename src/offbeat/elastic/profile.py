"""Profile and plan of a job whose members change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from offbeat.core.plan import Fact, Plan
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, repeated_ranks
from offbeat.core.profile.facts import scaled_compute
from offbeat.core.sim.prediction import MEMBERS_FACT
from offbeat.core.strategy.interface import Strategy

if TYPE_CHECKING:
    from offbeat.elastic.members import Members

MEMBER_ITERATIONS = 8  # iterations between two boundaries of plans with a period of one iteration


def for_members(
    profile: Profile, members: int, earlier: Sequence[int | None] | None = None
) -> Profile:
    """Return the profile of a job after a change of its members.

    The profile of one member keeps the costs of messages of two, which it does not send.

    Args:
        profile: profile of at least two replicas, or a result of this function.
        members: number of replicas.
        earlier: for each replica its index in `profile`; None if it was not measured, so that it
            computes as long as the mean of the measured ones. By default properties of single
            replicas are repeated in turn.
    """
    several = repeated_ranks(profile, 2) if profile.world_size == 1 else profile
    several = extrapolate(several, hosts=max(members, 2))
    found = several if members > 1 else repeated_ranks(several, 1)
    earlier = [i % profile.world_size for i in range(members)] if earlier is None else earlier
    if [*earlier] == [*range(profile.world_size)]:
        return found
    if profile.topology:
        sizes = tuple(profile.topology[0 if i is None else i] for i in earlier)
        found = replace(found, topology=sizes)
    if profile.rank_jitter:
        jitters = [profile.jitter if i is None else profile.rank_jitter[i] for i in earlier]
        uneven = tuple(jitters) if len({*jitters}) > 1 else ()
        found = replace(found, jitter=fmean(jitters), rank_jitter=uneven)
    known = profile.rank_scale or (1.0,) * profile.world_size
    scale = [1.0 if i is None else known[i] for i in earlier]
    return with_slower_replicas(replace(found, rank_scale=()), scale)


def with_slower_replicas(profile: Profile, times: Sequence[float]) -> Profile:
    """Return the profile with the compute times of each replica multiplied by a factor.

    Args:
        profile: measured profile.
        times: one factor per replica.
    """
    before = profile.rank_scale or (1.0,) * profile.world_size
    scale = [one * factor for one, factor in zip(before, times, strict=True)]
    mean = fmean(scale)
    if len({*times}) == 1:
        return replace(profile, **scaled_compute(profile, times[0]))
    even = scaled_compute(profile, mean)
    return replace(profile, rank_scale=tuple(one / mean for one in scale), **even)


def iterations_between_boundaries(plan: Plan) -> int:
    """Return the iterations between two comparisons of the members of a job."""
    return plan.period if plan.period > 1 else MEMBER_ITERATIONS


def plan_of_members(plan: Plan, profile: Profile, strategy: Strategy, settings: Members) -> Plan:
    """Return a plan with the comparisons of the members as a fact, for predictions.

    Raises:
        ValueError: the plan cannot run while members change.
    """
    from offbeat.elastic.members import require_supported_plan  # of processes; advice has none

    require_supported_plan(plan, strategy, settings)
    if profile.world_size == 1:
        return plan
    meaning = "iterations between two comparisons of the members"
    fact = Fact(MEMBERS_FACT, iterations_between_boundaries(plan), meaning)
    return replace(plan, facts=(*plan.facts, fact))
