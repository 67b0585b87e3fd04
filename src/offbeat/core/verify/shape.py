"""Check of each name and number of a plan, and of the rules that two messages must keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from typing import Any

from offbeat.core.codecs import WIRES
from offbeat.core.derive import effects
from offbeat.core.derive.fit import (
    Fault,
    Rule,
    fit_faults,
    moments_of,
    rule_name,
    size_faults,
    unknown_name,
    usable_buffers,
)
from offbeat.core.plan.phases import Phases
from offbeat.core.plan.program import has_moment_per_bucket, position
from offbeat.core.plan.types import (
    BUFFERS,
    BUILT_IN,
    MOMENT_PREFIX,
    Apply,
    Buffer,
    Moment,
    Payload,
    Plan,
    Transfer,
    Vote,
    Wire,
    base_link,
    groups_of,
    is_vote_channel,
    moment_of,
)
from offbeat.core.profile import Profile
from offbeat.core.rules import RULES, SETTINGS, VOTES, Setting

OTHER_HALF = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}


def faults(plan: Plan, profile: Profile | None = None) -> Iterator[Fault]:
    """Yield each fault of a plan: its message, and the rules that cause it."""
    sizes = list(size_faults(plan, profile))
    yield from sizes
    if sizes:
        return  # phases and buckets cannot be checked against wrong sizes
    yield from fit_faults(plan, profile)
    for rule in (*plan.transfers, *plan.applies, *plan.votes):
        name = rule_name(rule)
        for words in (*_moment_faults(rule, name, plan), *_rule_faults(rule, name, plan, profile)):
            yield words, (rule,)
    for words in (*_buffer_faults(plan), *_vote_faults(plan)):
        yield words, ()
    yield from _unpaired_halves(plan)
    yield from _duplicates(plan)
    yield from _sharing_faults(plan)


def _moment_faults(rule: Rule, name: str, plan: Plan) -> Iterator[str]:
    """Yield faults of the moments and phases of a rule."""
    for role, moment in moments_of(rule):
        if moment.bucket is not None and moment.point in ("step", "end"):
            yield f"{role} {moment} of {name} must not name a bucket"
    if isinstance(rule, Apply):
        if rule.at.lag and not (rule.at.point == "forward" and rule.at.lag == 1):
            yield f"moment {rule.at} of {name} must lie in its own iteration: use phases instead"
        if effects.is_update(rule) and rule.at == Moment("forward", rule.at.bucket):
            # `zero_grad()` of the script runs before this forward.
            yield (
                f"{name} at {rule.at} has no gradients yet; apply those of the iteration before, +1"
            )
    lost = Phases(set(_missing_phases(rule.phases, plan)))
    if lost or not rule.phases:
        yield (
            f"{name} never fires in phases {lost}: the plan has the phases "
            f"0..{len(plan.phases) - 1}"
        )


def _missing_phases(phases: Phases, plan: Plan) -> list[int]:
    """Return the first phase of each run that the plan does not have."""
    stop = len(plan.phases)
    return [max(a, stop) for a, z in phases.runs if z > stop] + [a for a, _ in phases.runs if a < 0]


def _rule_faults(rule: Rule, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:
    """Yield faults of all other fields of a rule."""
    if isinstance(rule, Vote):
        yield from unknown_name("rule", rule.rule, name, VOTES)
        if _position_from_start(rule.due, plan) <= _position_from_start(rule.at, plan):
            yield f"{name} is due {rule.due}, but taken only at {rule.at}; it must be due later"
        if rule.buckets is not None and not _is_run(rule.buckets, plan):
            yield f"{name} must name a run of buckets within 0..{plan.buckets - 1}"
        yield from _settings_faults(rule.rule, rule.args, name, plan, profile)
        return
    run = rule.payload.buckets if isinstance(rule, Transfer) else rule.buckets
    if not _is_run(run, plan):
        yield f"{name} must name a run of buckets within 0..{plan.buckets - 1}"
    if rule.ago < 0:
        yield f"{name} must not depend on a vote of a later iteration (ago {rule.ago})"
    if rule.when is not None:
        votes = {vote.name: vote for vote in plan.votes}
        # An earlier iteration may have any phase.
        needed = Phases(plan.phases) if rule.ago else rule.phases
        if rule.when in votes and not needed <= votes[rule.when].phases:
            yield f"{name} depends on the vote {rule.when!r} in phases in which there is none"
    if isinstance(rule, Apply):
        yield from _apply_faults(rule, name, plan, profile)
    else:
        yield from _transfer_faults(rule, name, plan, profile)


def _is_run(run: range, plan: Plan) -> bool:
    return 0 <= run.start < run.stop <= plan.buckets and run.step == 1


def _transfer_faults(t: Transfer, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:  # noqa: C901
    payload, known = t.payload, plan.all_buffers
    if t.verb != "broadcast":
        known = usable_buffers(plan)
    elif payload != Payload(BUFFERS, range(plan.buckets)) or t.into or t.wire or t.when:
        yield f"{name} must carry {BUFFERS} of all buckets, whole and without a vote"
    wire = t.wire
    for buffer in (t.into, *((wire.error, wire.anchor) if wire else ())):
        if buffer is not None:
            yield from unknown_name("buffer", buffer, name, known)
    if not 0 <= payload.part < payload.part + payload.width <= payload.parts:
        yield f"{name} must be one of its {payload.parts} parts"
    if payload.parts > 1 and len(payload.buckets) > 1:
        yield f"{name} cuts a run of buckets; cut one bucket, or send the run whole"
    if not 0 <= payload.age < _copy_count(plan, payload.buffer):
        yield (
            f"age ({payload.age}) of {name} must be below the copies of {payload.buffer} "
            f"({_copy_count(plan, payload.buffer)})"
        )
    if t.into is not None and t.into in known and payload.buffer in known:
        source, target = known[payload.buffer], known[t.into]
        is_state = any(
            one == "state" or moment_of(one) is not None for one in (payload.buffer, t.into)
        )
        if source.kind != target.kind or target.copies > 1 or is_state:
            yield f"{name} must go into a buffer of the same shape that has one copy"
    if t.wire is not None:
        yield from unknown_name("wire", t.wire.name, name, WIRES)
        yield from _settings_faults(t.wire.name, t.wire.args, name, plan, profile)
        yield from _error_faults(t, name, plan)
        yield from _anchor_faults(t, t.wire, name, plan)
        if t.verb not in ("all_reduce", "send"):
            yield f"{name} cannot be encoded as {t.wire.name}: only all_reduce and send can"
    if t.verb == "send":
        if payload.age and t.into is None:
            yield f"{name} must name the buffer that the older copy goes into"
    elif t.verb == "exchange" and t.into is None:
        yield f"{name} must name the buffer that the payload of the other rank goes into"
    elif _position_from_start(t.before, plan) <= _position_from_start(t.after, plan):
        yield f"deadline {t.before} of {name} comes before its release {t.after}"
    groups = groups_of(t.link, plan.groups)
    if t.ranks is not None and groups and not any(set(t.ranks) <= set(one) for one in groups):
        yield f"{name} must name two ranks of one group of its link, or use another link"
    if is_vote_channel(t.link):
        yield f"link {t.link!r} of {name} carries votes alone; use another channel of it"


def _error_faults(t: Transfer, name: str, plan: Plan) -> Iterator[str]:
    """Yield faults of the error buffer of a codec."""
    error = t.wire.error if t.wire else None
    known = plan.all_buffers
    if error is None or error not in known or t.payload.buffer not in known:
        return
    given, kind = known[error], known[t.payload.buffer].kind
    if error in BUILT_IN or error in (t.payload.buffer, t.into):
        yield f"error ({error!r}) of {name} must be a buffer of its own"
    elif given.kind != kind or given.copies > 1:
        yield f"error ({error!r}) of {name} must be a buffer like {kind} that has one copy"


def _anchor_faults(t: Transfer, wire: Wire, name: str, plan: Plan) -> Iterator[str]:
    """Yield faults of an encoded transfer and of its anchor."""
    known, linear = plan.all_buffers, wire.name in WIRES and WIRES[wire.name].linear
    if t.verb == "send" and linear:
        yield f"{name} cannot be encoded as {wire.name}: only all_reduce can"
    elif t.verb == "send" and wire.arg("via", "gather") != "gather":
        yield f"via ({wire.arg('via')!r}) of {name} must be left out: it goes to one rank"
    if t.sends_delta and wire.error is not None:
        yield (
            f"error ({wire.error!r}) of {name} must be left out: what is lost stays in the "
            "difference to its anchor"
        )
    if t.payload.buffer == "state" or t.payload.moment is not None:
        yield f"{name} cannot be encoded: only gradients and parameters can"
    if wire.anchor is None or wire.anchor not in known or t.payload.buffer not in known:
        return
    anchor = known[wire.anchor]
    taken = (*BUILT_IN, t.payload.buffer, t.into, wire.error)
    if wire.anchor in taken or anchor.start != "param" or anchor.copies > 1:
        yield (
            f"anchor ({wire.anchor!r}) of {name} must be a buffer of its own that starts as the "
            "parameters and has one copy"
        )
    elif groups_of(t.link, plan.groups) and not t.sends_delta:
        yield (
            f"anchor ({wire.anchor!r}) of {name} must be left out: it is the same on all ranks, "
            f"and {base_link(t.link)!r} spans groups of them"
        )
    elif known[t.payload.buffer].kind != "param":
        yield f"anchor ({wire.anchor!r}) of {name} must be left out: only parameters have one"


def _sharing_faults(plan: Plan) -> Iterator[Fault]:
    """Yield a fault if two transfers share an error buffer or an anchor that they must not share.

    Messages of two links have no common order, so the content of a shared buffer would depend on
    timing.
    """
    wired = [t for t in plan.transfers if t.wire is not None and (t.wire.error or t.wire.anchor)]
    for one, other in combinations(wired, 2):
        what = _shared_resource(one, other)
        if what is not None and _share_elements(one, other) and _share_sender(one, other):
            words = f"{one.id} and {other.id} share an {what}; give each link its own"
            yield words, (one, other)
            return


def _shared_resource(one: Transfer, other: Transfer) -> str | None:
    """Return the name of the resource that two messages share without a defined order, or None."""
    a, b = one.wire, other.wire
    assert a is not None
    assert b is not None
    if a.anchor is not None and a.anchor == b.anchor and one.sends_delta != other.sends_delta:
        return "anchor"
    if one.link == other.link:
        return None
    if a.error is not None and a.error == b.error:
        return "error buffer"
    return "anchor" if one.sends_delta and other.sends_delta and a.anchor == b.anchor else None


def _share_sender(one: Transfer, other: Transfer) -> bool:
    """Return whether one rank encodes both messages."""
    senders = [t.ranks and t.ranks[0] for t in (one, other)]
    return None in senders or senders[0] == senders[1]


def _share_elements(one: Transfer, other: Transfer) -> bool:
    """Return whether the payloads of two transfers have an element in common."""
    a, b = one.payload, other.payload
    if not set(a.buckets) & set(b.buckets):
        return False
    return a.part * b.parts < (b.part + b.width) * a.parts and (
        b.part * a.parts < (a.part + a.width) * b.parts
    )


def _apply_faults(apply: Apply, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:
    yield from unknown_name("rule", apply.rule, name, RULES)
    yield from _settings_faults(apply.rule, apply.args, name, plan, profile)
    copies = _copy_count(plan, "grad")
    if isinstance(apply.arg("age", 0), int) and apply.arg("age", 0) >= copies:
        yield f"age ({apply.arg('age')}) of {name} must be below the copies of grad ({copies})"
    if not effects.is_window_end(apply):
        return
    if apply.buckets != range(plan.buckets) or apply.ranks is not None or apply.when is not None:
        yield f"{name} must close the gradients of all buckets, on all ranks, without a vote"
    if has_moment_per_bucket(apply) or apply.at.point not in ("step", "end"):
        yield f"moment {apply.at} of {name} must be step or end: a window ends with its iteration"
    if copies < 2:
        yield f"copies ({copies}) of grad must be at least 2 for {name}"


def _settings_faults(
    rule: str, args: Iterable[tuple[str, Any]], name: str, plan: Plan, profile: Profile | None
) -> Iterator[str]:
    """Yield faults of the settings of a rule, a vote or a wire."""
    allowed, given = SETTINGS.get(rule), dict(args)
    if allowed is None:
        return
    for key in given:
        yield from unknown_name("setting", key, name, allowed)
    usable = usable_buffers(plan)
    kinds = set()
    for key, setting in allowed.items():
        value = given.get(key, setting.default)
        if value is None:
            if not setting.optional:
                yield f"{key} of {name} must be given"
        else:
            what = f"{key} ({value!r}) of {name}"
            yield from _setting_faults(what, value, setting, usable, profile)
            if setting.what == "buffer" and value in usable:
                kinds.add(usable[value].kind)
    if len(kinds) > 1:
        yield f"{name} must name buffers of one kind"


def _setting_faults(  # noqa: C901
    what: str, value: Any, setting: Setting, usable: dict[str, Buffer], profile: Profile | None
) -> Iterator[str]:
    """Yield faults of one setting."""
    if setting.what == "buffer":
        if value not in usable:
            yield f"{what} must be one of {', '.join(sorted(usable))}"
        elif setting.kind not in (None, usable[value].kind):
            yield f"{what} must be a buffer like {setting.kind}"
    elif setting.what == "word":
        if value not in setting.words:
            yield f"{what} must be one of {', '.join(setting.words)}"
    elif setting.what == "numbers":
        if not isinstance(value, tuple) or not all(map(_is_number, value)):
            yield f"{what} must be numbers, one per rank"
        elif profile is not None and len(value) != profile.world_size:
            yield f"{what} must be {profile.world_size} numbers, one per rank"
    elif setting.what == "count" and not isinstance(value, int):
        yield f"{what} must be a whole number"
    elif setting.above and value == setting.least:
        yield f"{what} must be above {setting.least:g}"
    elif not _is_number(value) or not setting.least <= value <= setting.most:
        yield f"{what} must be a number from {setting.least:g} to {setting.most:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _buffer_faults(plan: Plan) -> Iterator[str]:
    names = [buffer.name for buffer in plan.buffers]
    for buffer in plan.buffers:
        given = BUILT_IN.get(buffer.name)
        if names.count(buffer.name) > 1:
            yield f"buffer {buffer.name!r} must be listed once"
        is_moment = buffer.name.startswith(MOMENT_PREFIX)
        if is_moment and (moment_of(buffer.name) is None or buffer.kept):
            yield (
                f"buffer {buffer.name!r} must be {MOMENT_PREFIX}0, {MOMENT_PREFIX}1, ..., and not "
                "kept: checkpoints of the optimizer contain it"
            )
        if is_moment and (buffer.kind, buffer.start, buffer.copies) != ("grad", "zero", 1):
            yield f"buffer {buffer.name!r} must be like grad, with one copy that starts as zero"
        if buffer.copies < 1:
            yield f"copies ({buffer.copies}) of buffer {buffer.name!r} must be at least 1"
        if given is not None and (buffer.kind, buffer.start) != (given.kind, given.start):
            yield f"buffer {buffer.name!r} is in every plan; only its copies can be set"
        if buffer.name in ("param", "state", BUFFERS) and buffer.copies != 1:
            yield f"buffer {buffer.name!r} has one copy"


def _vote_faults(plan: Plan) -> Iterator[str]:
    names = [vote.name for vote in plan.votes]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"vote {name!r} must be defined once"


def _unpaired_halves(plan: Plan) -> Iterator[Fault]:
    """Yield reduce_scatters without their all_gather, and all_gathers without their
    reduce_scatter."""
    halves: dict[Any, list[Transfer]] = {}
    for t in plan.transfers:
        if t.verb in OTHER_HALF:
            halves.setdefault((t.verb, t.payload), []).append(t)
    for (verb, payload), transfers in halves.items():
        other = OTHER_HALF[verb]
        for t in transfers:
            if not any(t.phases <= o.phases for o in halves.get((other, payload), ())):
                words = f"{t.id} must come with its other half, {other}, in the same iterations"
                yield words, (t,)


def _duplicates(plan: Plan) -> Iterator[Fault]:
    """Yield transfers that have the same name in the same iteration."""
    same: dict[str, list[Transfer]] = {}
    for t in plan.transfers:
        same.setdefault(t.id, []).append(t)
    for name, transfers in same.items():
        runs = sorted((run, i) for i, t in enumerate(transfers) for run in t.phases.runs)
        clash = next((p for p in pairwise(runs) if p[1][0][0] < p[0][0][1]), None)
        if clash is not None:
            words = f"{name} exists twice in phase {clash[1][0][0]}; use another channel for one"
            yield words, tuple(transfers[i] for _, i in clash)


def _copy_count(plan: Plan, buffer: str) -> int:
    return plan.all_buffers[buffer].copies if buffer in plan.all_buffers else 1


def _position_from_start(moment: Moment, plan: Plan) -> int:
    return position(moment, plan.buckets) + moment.lag * (2 * plan.buckets + 2)
