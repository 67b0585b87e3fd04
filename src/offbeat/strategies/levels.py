"""Two levels: replicas of several ranks, which share their gradients, and a strategy between them.

In sharded replicas FSDP averages the gradients, and the plan is that of the strategy alone. In
replicated ones these are messages of the plan.

The plan is one of replicas. On the link `INSIDE` each replica is a group of its own, because a
collective on it averages over the ranks of one replica. On the other links a collective averages
over all replicas, as in the plan of the strategy alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.derive.deferred import early_remedy
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.plan import INSIDE, Moment, Payload, Phases, Plan, Transfer
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned
from offbeat.strategies.wfbp import WFBP

STEP = Moment("step")


def two_levels(strategy: Planned, profile: Profile) -> Plan:
    """Return the strategy's plan between replicas, with averages of gradients inside them.

    Gradients are averaged inside a replica in every iteration, in the messages of WFBP for the link
    inside. They are not if FSDP averages them, or if the strategy averages them over all
    replicas itself: then its own messages average over both levels at once.

    Args:
        strategy: strategy between replicas.
        profile: profile of replicas of several ranks.

    Raises:
        ValueError: the strategy cannot run between replicas of several ranks.
    """
    _, plan = _choose_variant(strategy, profile)
    if profile.sharded or _averages_all_gradients(plan):
        return plan
    inside = tuple(_inside_transfers(plan, profile))
    groups = {INSIDE: tuple((replica,) for replica in range(profile.world_size))}
    return replace(plan, transfers=inside + plan.transfers, groups=groups)


def variant_of(strategy: Planned, profile: Profile) -> Planned:
    """Return the variant of a strategy that runs between replicas of several ranks.

    It is the strategy itself, unless its rules use gradients in backward, before these are averaged
    inside a replica, or it updates sharded parameters outside of `optimizer.step()`. Then it is the
    variant whose updates run there.

    Raises:
        ValueError: there is no such variant.
    """
    return _choose_variant(strategy, profile)[0]


def _choose_variant(strategy: Planned, profile: Profile) -> tuple[Planned, Plan]:
    """Return the variant of a strategy and its plan between replicas; see `variant_of`."""
    plan = strategy.plan_of_replicas(profile)
    _require_alike(strategy, plan, profile)
    if _conflict(plan, profile) is None:
        return strategy, plan
    variant = strategy.at_step()
    plan = plan if variant is None else variant.plan_of_replicas(profile)
    conflict = _conflict(plan, profile)
    if conflict is not None:
        raise ValueError(f"strategy ({strategy}) {conflict}")
    return variant or strategy, plan


def _conflict(plan: Plan, profile: Profile) -> str | None:
    """Return why a plan cannot run between replicas of several ranks, and the remedy; else None."""
    if profile.sharded:
        remedy = early_remedy(plan)
        return remedy and (
            "must update in optimizer.step() where the model is sharded (fully_shard), because "
            f"FSDP gathers weights at moments of its own; {remedy}"
        )
    if _averages_all_gradients(plan) or not _uses_gradients_early(plan):
        return None
    return (
        "uses gradients in backward, where they are not yet averaged over the ranks of a replica; "
        "use a strategy that updates in optimizer.step(), or start one rank per replica"
    )


def _averages_all_gradients(plan: Plan) -> bool:
    """Return whether all gradients are averaged over all replicas before any rule depends on them,
    so that averages over ranks and over replicas are one."""
    others = (a for a in plan.applies if not (effects.is_update(a) or effects.is_window_end(a)))
    own = any(effects.uses_any(apply, ("grad",)) for apply in others)
    return sends_only_gradients(plan) and not plan.votes and not own


def _uses_gradients_early(plan: Plan) -> bool:
    """Return whether a rule, a vote or a message uses gradients in backward."""
    applies = any(
        a.at.point == "grad" and (effects.is_update(a) or effects.uses_any(a, ("grad",)))
        for a in plan.applies
    )
    return applies or any(vote.at.point == "grad" for vote in plan.votes)


def _inside_transfers(plan: Plan, profile: Profile) -> Iterator[Transfer]:
    """Yield the messages inside a replica, without the gradients that the plan averages itself."""
    assert profile.inside is not None
    buckets = tuple(replace(bucket, communication_s={}) for bucket in profile.buckets)
    alone = replace(profile.of_replicas(), buckets=buckets, links=(profile.inside,), contention=())
    for t in WFBP().schedule(alone).transfers:
        for run, phases in _runs(t.payload.buckets, plan):
            if phases:
                after = Moment("grad", run[-1])
                yield replace(t, payload=Payload("grad", run), after=after, phases=Phases(phases))


def _runs(buckets: range, plan: Plan) -> Iterator[tuple[range, Sequence[int]]]:
    """Yield runs of buckets with the phases in which the plan does not average their gradients."""
    start, before = buckets.start, _open_phases(buckets.start, plan)
    for b in buckets[1:]:
        phases = _open_phases(b, plan)
        if phases != before:
            yield range(start, b), before
            start, before = b, phases
    yield range(start, buckets.stop), before


def _open_phases(bucket: int, plan: Plan) -> Sequence[int]:
    averaged: set[int] = set()
    for t in plan.transfers:
        if t.payload.buffer == "grad" and bucket in t.payload.buckets and t.when is None:
            averaged.update(t.phases)
    return [phase for phase in plan.phases if phase not in averaged]


def _require_alike(strategy: Planned, plan: Plan, profile: Profile) -> None:
    """Raise ValueError unless all replicas have the same part in messages."""
    if plan.source is not None or plan.groups or any(t.ranks is not None for t in plan.transfers):
        raise ValueError(
            f"strategy ({strategy}) must average over all replicas where these have several ranks, "
            "but it sends between single ones; use wfbp or dreamddp, or start one rank per replica"
        )
    uneven = len(set(profile.topology)) > 1
    if uneven and any(
        apply.ranks is not None or any(effects.per_rank_settings(apply)) for apply in plan.applies
    ):
        raise ValueError(
            f"strategy ({strategy}) must treat all replicas alike where they have "
            f"{', '.join(map(str, profile.topology))} ranks, because averages are weighted by "
            "these numbers; leave its weights out, or give every replica as many ranks"
        )
