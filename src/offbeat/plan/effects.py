"""What the rules of a plan do to whom, from what they declare beside themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from offbeat.numerics import EFFECTS, SETTINGS
from offbeat.numerics.base import Use
from offbeat.plan.model import BUILT_IN, Apply, Plan


def updates(apply: Apply) -> bool:
    """Whether it is a step of the user's optimizer."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].role == "update"


def closes(apply: Apply) -> bool:
    """Whether it ends an accumulation window."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].role == "close"


def conserves(apply: Apply) -> bool:
    """Whether every gradient must arrive once where it acts, too."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].conserves


def by_bucket(apply: Apply) -> bool:
    """Whether it does to a run of buckets what it does to each."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].by_bucket


def reads(apply: Apply) -> frozenset[str]:
    """Buffers whose content matters to it."""
    return EFFECTS[apply.rule].reads | {*_buffers(apply, ("reads", "changes"))}


def writes(apply: Apply) -> frozenset[str]:
    """Buffers that it changes."""
    return EFFECTS[apply.rule].writes | {*_buffers(apply, ("writes", "changes"))}


def touches(apply: Apply, buffers: Collection[str]) -> bool:
    """Whether it uses one of some buffers; of a rule that nobody knows that is to be feared."""
    if apply.rule not in EFFECTS:
        return True
    return not (reads(apply) | writes(apply)).isdisjoint(buffers)


def only_writes(apply: Apply, buffers: Collection[str]) -> bool:
    """Whether it changes nothing but some buffers."""
    return apply.rule in EFFECTS and writes(apply) <= set(buffers)


def landings(plan: Plan) -> Sequence[Apply]:
    """Applies that bring into the parameters what was sent in an earlier iteration and has waited
    beside them. Where ranks hand parameters on there are none: what a rank has is its own."""
    if plan.source is not None:
        return ()
    return [a for a in plan.applies if not updates(a) and "param" in writes(a) and _late(a, plan)]


def waiting(plan: Plan) -> Sequence[str]:
    """Buffers in which something waits to land: as they start, they change nothing, or a prologue
    comes first in which nothing lands."""
    names = {name for apply in landings(plan) for name in reads(apply) - BUILT_IN.keys()}
    kept = {name for apply in plan.applies for name in common_of(apply)}
    return sorted(names - kept)


def common(plan: Plan) -> frozenset[str]:
    """Buffers that must be the same on all ranks, or their replicas part."""
    return frozenset(name for apply in plan.applies for name in common_of(apply))


def contracted(apply: Apply, factor: float) -> Apply:
    """The same, leaving less of a difference between replicas."""
    shares = {
        name: share * factor
        for name, setting in SETTINGS.get(apply.rule, {}).items()
        if setting.contracts and (share := apply.arg(name, setting.default)) < 1
    }
    if not shares:
        return apply
    return replace(apply, args=tuple((dict(apply.args) | shares).items()))


def _late(apply: Apply, plan: Plan) -> bool:
    """Whether it reads a buffer that messages of earlier iterations fill or have taken."""
    for t in plan.transfers:
        carried = {t.payload.buffer, t.target} - BUILT_IN.keys()
        if carried & reads(apply) and set(t.payload.buckets) & set(apply.buckets):
            own = not (t.before.lag or apply.at.lag) and apply.phases <= t.phases
            if not own:
                return True
    return False


def _buffers(apply: Apply, uses: Collection[Use]) -> Iterator[str]:
    for name, setting in SETTINGS[apply.rule].items():
        if setting.what == "buffer" and setting.use in uses:
            buffer = apply.arg(name, setting.default)
            if buffer is not None:
                yield buffer


def common_of(apply: Apply) -> list[str]:
    """Buffers that must be the same on all ranks for it to leave replicas alike."""
    return [*_common(apply)]


def origin(apply: Apply) -> str | None:
    """The setting that may name a buffer from which it counts changes."""
    settings = SETTINGS.get(apply.rule, {})
    return next((name for name, setting in settings.items() if setting.origin), None)


def _common(apply: Apply) -> Iterator[str]:
    for name, setting in SETTINGS.get(apply.rule, {}).items():
        if setting.common and (buffer := apply.arg(name, setting.default)) is not None:
            yield buffer
