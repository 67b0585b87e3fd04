"""Checks of plans: what is wrong with a plan, said before anything runs.

Names and numbers are looked at one by one. Everything else is found by executing the plan on
made-up numbers, a few workers and periods long: who touches what is in flight, who waits for
ever, whether all replicas end up with every gradient, once. So what `check` accepts has one meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from offbeat.numerics import RULES, VOTES, WIRES
from offbeat.plan.interpreter import Array, Conflict, Interpreter, Model, Worker
from offbeat.plan.model import BUILT_IN, Apply, Moment, Payload, Plan, Transfer, Vote, base_link
from offbeat.plan.phases import Phases
from offbeat.plan.program import Program, position
from offbeat.profile import Profile

Rule = Transfer | Apply | Vote
MOST_SLICES = 4096  # of one bucket, in the sizes of all its messages together
CONSERVING = {"local", "close", "reset", "copy", "delta", "add", "clear"}
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a plan. `rules` are those at fault; str() prints the plan with arrows."""

    message: str
    plan: Plan
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return f"{self.message}\n{self.plan.text(mark=self.rules)}"


def check(plan: Plan, profile: Profile | None = None) -> list[Problem]:
    """Everything that is wrong with a plan: all faulty names and numbers, else the first fault in
    what it does. With a profile also whether both fit together."""
    shape = list(_shape(plan, profile))
    if shape:
        return shape  # nothing can be executed while names and numbers are wrong
    return list(_executed(plan, profile))[:1]


def raise_if_wrong(plan: Plan, profile: Profile | None = None) -> None:
    """ValueError with the first problem, if there is one."""
    problems = check(plan, profile)
    if problems:
        more = f"\n(and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the plan is wrong: {problems[0]}{more}")


# ---- names and numbers ----------------------------------------------------------------------


def _shape(plan: Plan, profile: Profile | None) -> Iterator[Problem]:
    if profile is not None and plan.buckets != len(profile.buckets):
        yield Problem(
            f"the plan has {plan.buckets} buckets, the profile {len(profile.buckets)}; "
            "plan again from this profile",
            plan,
        )
    for rule in (*plan.transfers, *plan.applies, *plan.votes):
        name = rule.id if not isinstance(rule, Vote) else f"vote {rule.name!r}"
        for words in (*_when(rule, name, plan), *_what(rule, name, plan, profile)):
            yield Problem(words, plan, (rule,))
    for words in (*_buffers(plan), *_groups(plan, profile), *_votes(plan)):
        yield Problem(words, plan)
    yield from _halves(plan)


def _when(rule: Rule, name: str, plan: Plan) -> Iterator[str]:
    """Moments and phases."""
    moments = {
        Transfer: lambda t: (("release", t.after), ("deadline", t.before)),
        Apply: lambda a: (("moment", a.at),),
        Vote: lambda v: (("moment", v.at), ("deadline", v.due)),
    }[type(rule)](rule)
    for role, moment in moments:
        if moment.bucket is not None and not 0 <= moment.bucket < plan.buckets:
            yield f"{role} {moment} of {name} never fires: there are {plan.buckets} buckets"
        if (moment.bucket is not None) and moment.point in ("step", "end"):
            yield f"{role} {moment} of {name} must not name a bucket"
        if moment.lag < 0:
            yield f"{role} {moment} of {name} must not lie before its iteration"
        own = role == "release" or (role == "moment" and not _at_next_forward(rule, moment))
        if own and moment.lag:
            # A rank that evaluates or saves alone would wait for the others' next forward.
            yield f"{role} {moment} of {name} must lie in its own iteration: use phases instead"
    lost = Phases(sorted(set(rule.phases.runs and _outside(rule.phases, plan))))
    if lost or not rule.phases:
        yield (
            f"{name} never fires in phases {lost}: the plan has the phases "
            f"0..{len(plan.phases) - 1}"
        )


def _at_next_forward(rule: Rule, moment: Moment) -> bool:
    return isinstance(rule, Apply) and moment.point == "forward" and moment.lag == 1


def _outside(phases: Phases, plan: Plan) -> list[int]:
    """The first phases that the plan does not have."""
    stop = len(plan.phases)
    return [max(a, stop) for a, z in phases.runs if z > stop] + [a for a, _ in phases.runs if a < 0]


def _what(rule: Rule, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:
    if isinstance(rule, Vote):
        yield from _known("rule", rule.rule, name, VOTES)
        if position(rule.due, plan.buckets) < position(rule.at, plan.buckets) and not rule.due.lag:
            yield f"{name} is due {rule.due}, before it is taken at {rule.at}"
        return
    run = rule.payload.buckets if isinstance(rule, Transfer) else rule.buckets
    if not 0 <= run.start < run.stop <= plan.buckets or run.step != 1:
        yield f"{name} must name a run of buckets within 0..{plan.buckets - 1}"
    if rule.when is not None:
        votes = {vote.name: vote for vote in plan.votes}
        yield from _known("vote", rule.when, name, votes)
        if rule.when in votes and not rule.phases <= votes[rule.when].phases:
            yield f"{name} depends on the vote {rule.when!r} in phases in which there is none"
    if isinstance(rule, Apply):
        yield from _known("rule", rule.rule, name, RULES)
        age, copies = rule.arg("age", 0), _copies(plan, "grad")
        if not 0 <= age < copies:
            yield f"age ({age}) of {name} must be below the copies of grad ({copies})"
    else:
        yield from _transfer(rule, name, plan, profile)


def _transfer(t: Transfer, name: str, plan: Plan, profile: Profile | None) -> Iterator[str]:
    payload, known = t.payload, plan.all_buffers
    for buffer in (payload.buffer, t.into, t.wire.error if t.wire else None):
        if buffer is not None:
            yield from _known("buffer", buffer, name, known)
    if not 0 <= payload.part < payload.part + payload.width <= payload.parts:
        yield f"{name} must be one of its {payload.parts} parts"
    if payload.parts > 1 and len(payload.buckets) > 1:
        yield f"{name} cuts a run of buckets; cut one bucket, or send the run whole"
    if not 0 <= payload.age < _copies(plan, payload.buffer):
        yield (
            f"age ({payload.age}) of {name} must be below the copies of {payload.buffer} "
            f"({_copies(plan, payload.buffer)})"
        )
    if t.into is not None and t.into in known and payload.buffer in known:
        source, target = known[payload.buffer], known[t.into]
        if source.kind != target.kind or target.copies > 1 or "state" in (payload.buffer, t.into):
            yield f"{name} must go into a buffer of the same shape that has one copy"
    if t.wire is not None:
        yield from _known("wire", t.wire.name, name, WIRES)
        if t.verb not in ("all_reduce", "send"):
            yield f"{name} cannot be encoded as {t.wire.name}: only all_reduce and send can"
    if t.verb == "send":
        if t.ranks is None or len(t.ranks) != 2 or t.ranks[0] == t.ranks[1]:
            yield f"{name} must name two ranks, from and to"
    elif t.ranks is not None:
        yield f"{name} is a collective; the ranks it spans are the link's group"
    elif _place(t.before, plan) <= _place(t.after, plan):
        yield f"deadline {t.before} of {name} comes before its release {t.after}"
    if profile is None:
        return
    links = [link.name for link in profile.links]
    if base_link(t.link) not in links:
        yield f"link {t.link!r} of {name} must be one of {', '.join(links)}"
    if t.ranks is not None and not all(0 <= rank < profile.world_size for rank in t.ranks):
        yield f"{name} names a rank beyond 0..{profile.world_size - 1}"


def _buffers(plan: Plan) -> Iterator[str]:
    names = [buffer.name for buffer in plan.buffers]
    for buffer in plan.buffers:
        given = BUILT_IN.get(buffer.name)
        if names.count(buffer.name) > 1:
            yield f"buffer {buffer.name!r} must be listed once"
        if buffer.copies < 1:
            yield f"copies ({buffer.copies}) of buffer {buffer.name!r} must be at least 1"
        if given is not None and (buffer.kind, buffer.start) != (given.kind, given.start):
            yield f"buffer {buffer.name!r} is in every plan; only its copies can be set"
        if buffer.name in ("param", "state") and buffer.copies != 1:
            yield f"buffer {buffer.name!r} has one copy"


def _groups(plan: Plan, profile: Profile | None) -> Iterator[str]:
    for link, groups in plan.groups.items():
        members = sorted(rank for group in groups for rank in group)
        world = len(members) if profile is None else profile.world_size
        if members != list(range(world)):
            yield f"groups of link {link!r} must hold each of the ranks 0..{world - 1} once"


def _votes(plan: Plan) -> Iterator[str]:
    names = [vote.name for vote in plan.votes]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"vote {name!r} must be defined once"


def _halves(plan: Plan) -> Iterator[Problem]:
    """reduce_scatter and all_gather come in pairs."""
    for t in plan.transfers:
        other = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}.get(t.verb)
        if other is None:
            continue
        found = (
            o for o in plan.transfers
            if o.verb == other and o.payload == t.payload and t.phases <= o.phases
        )  # fmt: skip
        if next(found, None) is None:
            words = f"{t.id} must come with its other half, {other}, in the same iterations"
            yield Problem(words, plan, (t,))


def _known(what: str, name: str, where: str, known: Collection[str]) -> Iterator[str]:
    if name not in known:
        yield f"{what} {name!r} of {where} must be one of {', '.join(sorted(known)) or 'none'}"


def _copies(plan: Plan, buffer: str) -> int:
    return plan.all_buffers[buffer].copies if buffer in plan.all_buffers else 1


def _place(moment: Moment, plan: Plan) -> int:
    return position(moment, plan.buckets) + moment.lag * (2 * plan.buckets + 2)


# ---- what it does ---------------------------------------------------------------------------


def _executed(plan: Plan, profile: Profile | None) -> Iterator[Problem]:
    short = shortened(plan)
    originals = dict(zip(_all_rules(short), _all_rules(plan), strict=True))
    sizes = _sizes(plan)
    for b, size in enumerate(sizes):
        if size > MOST_SLICES:
            yield Problem(f"bucket {b} is cut into slices of too many sizes", plan)
            return
    ranks = _ranks(plan, profile)
    try:
        ends = _settled(short, sizes, ranks)
        if plan.votes:
            _settled(short, sizes, ranks, say=False)
        early = _settled(short, sizes, ranks, flushing=(0,)) if _pends(plan) else None
    except Conflict as conflict:
        rules = tuple(originals.get(rule, rule) for rule in conflict.rules)
        yield Problem(str(conflict), plan, rules)
        return
    yield from _replicas(plan, sizes, ends)
    if early is not None and not _equal(ends[0].weights, early[0].weights):
        yield Problem(
            "what the next forward waits for changes what is sent before that wait, so a rank that "
            "evaluates between iterations would train other weights; release it after the wait",
            plan,
        )


@dataclass
class _End:
    """A rank's weights in the end, and the sum of all gradients, averaged over ranks."""

    weights: Array
    gradients: Array


def _settled(
    plan: Plan, sizes: Sequence[int], ranks: int, *, say: bool = True, flushing: Sequence[int] = ()
) -> list[_End]:
    """Run until everything has happened once, then without gradients until nothing moves."""
    program = Program(plan)
    active = plan.prologue + plan.period + program.lag
    total = sum(sizes)
    rng = np.random.default_rng(0)
    start = rng.normal(size=total)
    sources = rng.normal(size=(ranks, active, total))
    offsets = np.concatenate([[0], np.cumsum(sizes)])

    def gradient(rank: int, iteration: int, run: range, weights: Array) -> Array:
        if iteration >= active:
            return np.zeros_like(weights)
        return sources[rank, iteration, offsets[run.start] : offsets[run.stop]]

    model = Model(sizes, start, gradient, merges_by_mean=False)
    interpreter = Interpreter(
        plan,
        model,
        ranks,
        votes=dict.fromkeys(VOTES, lambda *_: say),
        wires=dict.fromkeys(WIRES, lambda array, _: array),
        flushing=flushing,
    )
    # What was added up to late is applied when the next window closes: a period more.
    periods = 2 if any(apply.rule == "close" for apply in plan.applies) else 1
    interpreter.run(active + periods * plan.period + 2 * program.lag + 1)
    moved = start - sources.mean(axis=0).sum(axis=0)
    return [_End(worker.buffers["param"][0], moved) for worker in interpreter.workers]


def _replicas(plan: Plan, sizes: Sequence[int], ends: Sequence[_End]) -> Iterator[Problem]:
    """After the gradients have stopped all replicas are equal, and hold every gradient once."""
    bucket_of = np.repeat(np.arange(plan.buckets), sizes)
    first = ends[0].weights
    for end in ends[1:]:
        apart = ~np.isclose(first, end.weights, rtol=0, atol=TOLERANCE)
        if apart.any():
            odd = np.flatnonzero(apart)
            bucket = int(bucket_of[odd[0]])
            some = int((bucket_of[odd] == bucket).sum()) < sizes[bucket]
            what = "only averaged in part" if some else "not averaged in every iteration, nor later"
            if not any(bucket in t.payload.buckets for t in plan.transfers):
                what = "never moved"
            yield Problem(f"bucket {bucket} is {what}, so its replicas drift apart", plan)
            return
    if {apply.rule for apply in plan.applies} <= CONSERVING:
        lost = ~np.isclose(first, ends[0].gradients, rtol=0, atol=TOLERANCE)
        if lost.any():
            bucket = int(bucket_of[np.flatnonzero(lost)[0]])
            yield Problem(
                f"bucket {bucket} does not get every gradient once: some are applied twice, late "
                "for ever, or never",
                plan,
            )


def _equal(a: Array, b: Array) -> bool:
    return bool(np.allclose(a, b, rtol=0, atol=TOLERANCE))


def _pends(plan: Plan) -> bool:
    """Whether the next forward waits for or applies something of this iteration."""
    moments = [t.before for t in plan.transfers] + [a.at for a in plan.applies]
    return any(moment.point == "forward" and moment.lag for moment in moments)


def _ranks(plan: Plan, profile: Profile | None) -> int:
    """Workers that show everything: two where all do the same, else all."""
    if plan.uniform:
        return 2
    named = [rank for rule in (*plan.transfers, *plan.applies) for rank in rule.ranks or ()]
    grouped = [rank for groups in plan.groups.values() for group in groups for rank in group]
    least = 1 + max([1, *named, *grouped])
    return max(least, profile.world_size) if profile is not None else least


def _sizes(plan: Plan) -> list[int]:
    """Elements of each bucket that make every slice of it a whole number of them; halves of an
    all-reduce cut it again."""
    sizes = [1] * plan.buckets
    for t in plan.transfers:
        shards = 1 if t.verb in ("all_reduce", "send") else 2
        for b in t.payload.buckets:
            sizes[b] = lcm(sizes[b], t.payload.parts * shards)
    return sizes


def shortened(plan: Plan) -> Plan:
    """The same plan with every long run of equal iterations cut short."""
    program = Program(plan)
    _, edges = program.shape()
    keep = 3 * program.lag + 4
    bounds = [*edges, len(plan.phases)] if edges[-1] < len(plan.phases) else edges
    starts = {bounds[0]: 0}
    for a, z in zip(bounds, bounds[1:], strict=False):
        starts[z] = starts[a] + min(z - a, keep)
    if starts[bounds[-1]] == len(plan.phases):
        return plan

    def cut(phases: Phases) -> Phases:
        return Phases.of_runs((starts[a], starts[z]) for a, z in phases.runs)

    prologue = starts[plan.prologue]
    return replace(
        plan,
        transfers=tuple(replace(t, phases=cut(t.phases)) for t in plan.transfers),
        applies=tuple(replace(a, phases=cut(a.phases)) for a in plan.applies),
        votes=tuple(replace(v, phases=cut(v.phases)) for v in plan.votes),
        prologue=prologue,
        period=starts[len(plan.phases)] - prologue,
    )


def _all_rules(plan: Plan) -> list[Rule]:
    return [*plan.transfers, *plan.applies, *plan.votes]
