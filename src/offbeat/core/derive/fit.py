"""Check that a plan can be executed on the buckets, ranks and links of a profile.

`core/verify/shape.py` checks all other names and numbers of a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from offbeat.core.derive import effects
from offbeat.core.plan import (
    BUFFERS,
    CHANNEL,
    Apply,
    Buffer,
    Moment,
    Plan,
    Transfer,
    Vote,
    base_link,
)
from offbeat.core.profile import Profile

Rule = Transfer | Apply | Vote
Fault = tuple[str, tuple[Rule, ...]]


def size_faults(plan: Plan, profile: Profile | None) -> Iterator[Fault]:
    """Yield faults of the numbers of buckets, iterations and ranks of the plan."""
    for name, least in (("buckets", 1), ("period", 1), ("prologue", 0)):
        if getattr(plan, name) < least:
            yield f"{name} ({getattr(plan, name)}) of the plan must be at least {least}", ()
    world = 1 + (plan.source or 0) if profile is None else profile.world_size
    if plan.source is not None and not 0 <= plan.source < world:
        yield f"source ({plan.source}) of the plan must be one of the ranks 0..{world - 1}", ()
    if profile is not None and plan.buckets != len(profile.buckets):
        words = f"the plan has {plan.buckets} buckets, the profile {len(profile.buckets)}; "
        yield words + "plan again from this profile", ()


def fit_faults(plan: Plan, profile: Profile | None) -> Iterator[Fault]:
    """Yield each fault of moments, votes, ranks and links: its message and the rules that cause it.

    The sizes of the plan must have no faults. Without a profile, any rank and link is accepted.
    """
    for rule in (*plan.transfers, *plan.applies, *plan.votes):
        for words in _rule_faults(rule, rule_name(rule), plan, profile):
            yield words, (rule,)
    for link, groups in plan.groups.items():
        if CHANNEL in link:
            yield f"groups of {link!r} must be those of its link: all its channels share them", ()
        members = sorted(rank for group in groups for rank in group)
        world = len(members) if profile is None else profile.world_size
        if members != list(range(world)):
            yield f"groups of link {link!r} must hold each of the ranks 0..{world - 1} once", ()
    closes = tuple(apply for apply in plan.applies if effects.is_window_end(apply))
    if closes and not any(p in a.phases for a in closes for p in plan.cycle):
        phases = ", ".join(str(apply.phases) for apply in closes)
        words = f"the rule {closes[0].rule} (in {phases}) must act in a phase of the period "
        words += f"({plan.cycle.start}-{plan.cycle.stop - 1})"
        yield f"{words}, or nothing is applied after the prologue", closes


def rule_name(rule: Rule) -> str:
    """Return the name of a rule for messages."""
    return f"vote {rule.name!r}" if isinstance(rule, Vote) else rule.id


def moments_of(rule: Rule) -> tuple[tuple[str, Moment], ...]:
    """Return the moments of a rule, each with its role."""
    if isinstance(rule, Transfer):
        return ("release", rule.after), ("deadline", rule.before)
    if isinstance(rule, Apply):
        return (("moment", rule.at),)
    return ("moment", rule.at), ("deadline", rule.due)


def usable_buffers(plan: Plan) -> dict[str, Buffer]:
    """Return the buffers that rules and messages may use. The module's buffers are only
    broadcast."""
    return {name: b for name, b in plan.all_buffers.items() if name != BUFFERS}


def unknown_name(what: str, name: str, where: str, known: Collection[str]) -> Iterator[str]:
    """Yield a fault if `name` is not one of `known`."""
    if name not in known:
        yield f"{what} {name!r} of {where} must be one of {', '.join(sorted(known)) or 'none'}"


def _rule_faults(rule: Rule, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:  # noqa: C901
    for role, moment in moments_of(rule):
        if moment.bucket is not None and not 0 <= moment.bucket < plan.buckets:
            yield f"{role} {moment} of {name} never fires: there are {plan.buckets} buckets"
        if moment.lag < 0:
            yield f"{role} {moment} of {name} must not lie before its iteration"
        if moment.lag and role != "deadline" and not isinstance(rule, Apply):
            # A rank that evaluates or saves alone would wait for the next forward of other ranks.
            yield f"{role} {moment} of {name} must lie in its own iteration: use phases instead"
    if isinstance(rule, Vote):
        return
    if rule.when is not None:
        yield from unknown_name("vote", rule.when, name, [vote.name for vote in plan.votes])
    named = rule.ranks or ()
    world = max(named, default=0) + 1 if profile is None else profile.world_size
    if not all(0 <= rank < world for rank in named):
        yield f"{name} names a rank beyond 0..{world - 1}"
    if isinstance(rule, Apply):
        return
    known = plan.all_buffers if rule.verb == "broadcast" else usable_buffers(plan)
    yield from unknown_name("buffer", rule.payload.buffer, name, known)
    if rule.verb in ("send", "exchange"):
        if rule.ranks is None or len(rule.ranks) != 2 or rule.ranks[0] == rule.ranks[1]:
            yield f"{name} must name two ranks{', from and to' if rule.verb == 'send' else ''}"
    elif rule.ranks is not None:
        yield f"{name} is a collective; the ranks it spans are the link's group"
    links = [base_link(rule.link)]
    if profile is not None:
        links = [link.name for link in profile.all_links]
    if base_link(rule.link) not in links:
        yield f"link {rule.link!r} of {name} must be one of {', '.join(links)}"
