"""Effects of applies: the buffers that they read and write, from the declared effects of their
rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import (
    BUFFERS,
    BUILT_IN,
    INSIDE,
    Apply,
    Moment,
    Plan,
    Transfer,
    base_link,
)
from offbeat.core.rules import EFFECTS, SETTINGS
from offbeat.core.rules.vocabulary import Use


def is_update(apply: Apply) -> bool:
    """Return whether the apply is a step of the user's optimizer."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].role == "update"


def is_window_end(apply: Apply) -> bool:
    """Return whether the apply ends an accumulation window."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].role == "close"


def conserves_gradients(apply: Apply) -> bool:
    """Return whether the apply keeps each gradient in the weights exactly once."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].conserves


def is_by_bucket(apply: Apply) -> bool:
    """Return whether the result for a run of buckets equals the results for each bucket."""
    return apply.rule in EFFECTS and EFFECTS[apply.rule].by_bucket


def reads(apply: Apply) -> frozenset[str]:
    """Return the buffers whose content the apply uses."""
    return EFFECTS[apply.rule].reads | {*_buffers(apply, ("reads", "changes"))}


def writes(apply: Apply) -> frozenset[str]:
    """Return the buffers that the apply changes."""
    return EFFECTS[apply.rule].writes | {*_buffers(apply, ("writes", "changes"))}


def uses_any(apply: Apply, buffers: Collection[str]) -> bool:
    """Return whether the apply uses one of `buffers`; an unregistered rule may use all of them."""
    if apply.rule not in EFFECTS:
        return True
    return not (reads(apply) | writes(apply)).isdisjoint(buffers)


def writes_only(apply: Apply, buffers: Collection[str]) -> bool:
    """Return whether the apply changes no buffer outside `buffers`."""
    return apply.rule in EFFECTS and writes(apply) <= set(buffers)


def sends_only_gradients(plan: Plan) -> bool:
    """Return whether a plan sends only gradients and module buffers, in every iteration.

    With such a plan equal replicas stay equal bit by bit.
    """
    return all(t.payload.buffer in ("grad", BUFFERS) and t.when is None for t in plan.transfers)


def differing_buckets(
    plan: Plan, iteration: int, replicas: int, decisions: Mapping[tuple[str, int], object]
) -> set[int]:
    """Return buckets whose parameters certainly differ between replicas after an iteration: each
    replica has updated them, and they have not been averaged since.

    Args:
        plan: plan that runs.
        iteration: number of the last iteration in the plan.
        replicas: number of replicas, at least 2.
        decisions: outcomes of votes by (vote, iteration), which count as true or false; a missing
            one counts as a yes.
    """
    if sends_only_gradients(plan) or plan.source is not None:
        return set()
    phase = plan.phase(iteration)
    updates = [a for a in plan.applies if is_update(a) and phase in a.phases]
    shares = {b: 1.0 for apply in updates for b in apply.buckets}  # not averaged
    for t in plan.transfers:
        voted = t.when is None or decisions.get((t.when, iteration - t.ago), True)
        if voted and _may_join_replicas(t, phase, replicas):
            for b in shares.keys() & set(t.payload.buckets):
                shares[b] -= t.payload.width / t.payload.parts
    return {b for b, share in shares.items() if share > 1e-9}


def _may_join_replicas(t: Transfer, phase: int, replicas: int) -> bool:
    """Return whether a transfer may make parameters equal that are updated in a phase, before the
    next forward. Averages of gradients do so in all phases."""
    buffer, due = t.payload.buffer, t.before
    if base_link(t.link) == INSIDE or buffer in ("state", BUFFERS) or t.payload.moment is not None:
        return False
    if buffer == "grad" and t.when is None:
        return True
    return phase in t.phases and not _is_late(due) and (t.verb != "exchange" or replicas == 2)


def _is_late(due: Moment) -> bool:
    """Return whether a message that is due at this moment may arrive after the next forward."""
    return due.lag > 1 or (due.lag == 1 and due.point != "forward")


def delayed_applies(plan: Plan) -> Sequence[Apply]:
    """Return the applies that write a result of an earlier iteration into the parameters.

    A plan with a `source` has none, because each rank holds its own parameters.
    """
    if plan.source is not None:
        return ()
    return [
        a
        for a in plan.applies
        if not is_update(a) and "param" in writes(a) and _is_delayed(a, plan)
    ]


def has_late_messages(plan: Plan) -> bool:
    """Return whether a message may arrive after the next forward."""
    return any(_is_late(t.before) for t in plan.transfers)


def delayed_buffers(plan: Plan) -> Sequence[str]:
    """Return the buffers whose contents a later iteration writes into the parameters.

    With their initial values they do not change the parameters.
    """
    names = {name for apply in delayed_applies(plan) for name in reads(apply) - BUILT_IN.keys()}
    kept = {name for apply in plan.applies for name in common_buffers_of(apply)}
    return sorted(names - kept)


def common_buffers(plan: Plan) -> frozenset[str]:
    """Return the buffers that must be equal on all ranks, otherwise replicas differ."""
    return frozenset(name for apply in plan.applies for name in common_buffers_of(apply))


def with_smaller_share(apply: Apply, factor: float) -> Apply:
    """Return the apply with shares `factor` times as large. The difference that it leaves between
    replicas is then `factor` times as large."""
    shares = {
        name: share * factor
        for name, setting in SETTINGS.get(apply.rule, {}).items()
        if setting.contracts and (share := apply.arg(name, setting.default)) < 1
    }
    if not shares:
        return apply
    return replace(apply, args=tuple((dict(apply.args) | shares).items()))


def _is_delayed(apply: Apply, plan: Plan) -> bool:
    """Return whether the apply reads a buffer that messages of earlier iterations fill or send.

    Sends from rank to rank are taken together: in each iteration other ranks may fill the buffer.
    """
    used = reads(apply)
    carriers = [
        t
        for t in plan.transfers
        if ({t.payload.buffer, t.target} - BUILT_IN.keys()) & used
        if set(t.payload.buckets) & set(apply.buckets)
    ]
    if any(t.before.lag or apply.at.lag for t in carriers):
        return True
    runs = [run for t in carriers if t.ranks is not None for run in t.phases.runs]
    filled = [t.phases for t in carriers if t.ranks is None]
    if runs:
        filled.append(Phases.of_runs(runs))
    return not all(apply.phases <= phases for phases in filled)


def _buffers(apply: Apply, uses: Collection[Use]) -> Iterator[str]:
    for name, setting in SETTINGS[apply.rule].items():
        if setting.what == "buffer" and setting.use in uses:
            buffer = apply.arg(name, setting.default)
            if buffer is not None:
                yield buffer


def common_buffers_of(apply: Apply) -> list[str]:
    """Return the buffers of the apply that must be equal on all ranks."""
    settings = SETTINGS.get(apply.rule, {}).items()
    named = [apply.arg(name, setting.default) for name, setting in settings if setting.common]
    return [buffer for buffer in named if buffer is not None]


def per_rank_settings(apply: Apply) -> Iterator[tuple[float, ...]]:
    """Yield the settings that hold one number per rank."""
    for name, value in apply.args:
        if SETTINGS[apply.rule][name].what == "numbers":
            yield value


def origin_setting(apply: Apply) -> str | None:
    """Return the name of the setting that names the reference buffer, from which differences are
    taken; None if the rule has no such setting."""
    settings = SETTINGS.get(apply.rule, {})
    return next((name for name, setting in settings.items() if setting.origin), None)
