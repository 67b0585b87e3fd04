"""Check of a plan before a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Moment, Plan, Transfer, Vote
from offbeat.core.profile import Profile

Rule = Transfer | Apply | Vote


def require_fit(plan: Plan, profile: Profile) -> None:
    """Raise ValueError if a moment never fires or a link, vote, buffer or rank does not exist."""
    if plan.buckets != len(profile.buckets):
        raise ValueError(
            f"the plan has {plan.buckets} buckets, the profile {len(profile.buckets)}; "
            "plan again from this profile"
        )
    for rule in (*plan.transfers, *plan.applies, *plan.votes):
        for words in _faults(rule, plan, profile):
            name = rule.name if isinstance(rule, Vote) else rule.id
            raise ValueError(f"{words.format(name=name)}\n{plan.text(mark=[rule])}")
    for link, groups in plan.groups.items():
        members = sorted(rank for group in groups for rank in group)
        if members != list(range(profile.world_size)):
            raise ValueError(
                f"groups of {link} ({members}) must hold every rank of "
                f"0..{profile.world_size - 1} once"
            )
    closes = [apply for apply in plan.applies if effects.is_window_end(apply)]
    if closes and not any(p in a.phases for a in closes for p in plan.cycle):
        phases = ", ".join(str(apply.phases) for apply in closes)
        raise ValueError(
            f"the rule {closes[0].rule} (in {phases}) must act in a phase of the period "
            f"({plan.cycle.start}-{plan.cycle.stop - 1}), or nothing is applied after the prologue"
        )


def _faults(rule: Rule, plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield the faults of a rule as messages with the placeholder `{name}` for its name."""
    for moment in _moments(rule):
        if not 0 <= (moment.bucket or 0) < plan.buckets:
            yield f"moment {moment} of {{name}} never fires: there are {plan.buckets} buckets"
        if moment.lag < 0:
            yield f"moment {moment} of {{name}} must not lie before its iteration"
    if isinstance(rule, Vote):
        if rule.at.lag:
            yield f"moment {rule.at} of {{name}} must lie in its own iteration"
        return
    if rule.when is not None and rule.when not in (votes := [vote.name for vote in plan.votes]):
        yield f"vote {rule.when!r} of {{name}} must be one of the plan's: {_join_names(votes)}"
    if not all(0 <= rank < profile.world_size for rank in rule.ranks or ()):
        yield f"ranks {rule.ranks} of {{name}} must lie in 0..{profile.world_size - 1}"
    if isinstance(rule, Transfer):
        yield from _transfer_faults(rule, plan, profile)


def _transfer_faults(t: Transfer, plan: Plan, profile: Profile) -> Iterator[str]:
    profile.link(t.link)
    if t.after.lag:
        yield f"release {t.after} of {{name}} must lie in its own iteration"
    if t.payload.buffer not in (known := plan.all_buffers):
        yield f"buffer {t.payload.buffer!r} of {{name}} must be one of {_join_names(known)}"
    if t.verb == "send" and (t.ranks is None or len(t.ranks) != 2 or t.ranks[0] == t.ranks[1]):
        yield "{name} must name two ranks, from and to"
    if t.verb != "send" and t.ranks is not None:
        yield "{name} is a collective; the ranks it spans are the link's group"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _moments(rule: Rule) -> tuple[Moment, ...]:
    if isinstance(rule, Transfer):
        return rule.after, rule.before
    return (rule.at,) if isinstance(rule, Apply) else (rule.at, rule.due)
