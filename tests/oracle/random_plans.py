"""Random plans: every verb, age, slice, channel, link, vote, wire, buffer, group and send.

`random_plan` puts methods together that make sense, each for its own run of buckets, at moments
and in phases drawn at random. `mutated` then breaks them, or not: about half of what comes out is
accepted by `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from offbeat.core.codecs import WIRES
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.program import position
from offbeat.plan import (
    Apply,
    Buffer,
    Moment,
    Payload,
    Phases,
    Plan,
    Transfer,
    Vote,
    Wire,
    channel,
    local,
)

STEP, END = Moment("step"), Moment("end")
GRAD = Buffer("grad", "grad")
CODECS: tuple[tuple[Any, ...], ...] = (
    *(("bf16",), ("fp16",), ("int8",), ("int4",), ("sign",), ("topk", ("fraction", 0.5))),
    *(("randomk", ("fraction", 0.5)), ("powersgd", ("rank", 1))),
)


def moment_at(place: int, buckets: int) -> Moment:
    """Return the moment at a position. It is the inverse of `position`."""
    if place >= 2 * buckets:
        return Moment("step" if place == 2 * buckets else "end")
    if place >= buckets:
        return Moment("grad", place - buckets)
    return Moment("forward", buckets - 1 - place)


def random_plan(rng: Random, *, broken: float = 0.5) -> Plan:
    """A plan of up to 4 buckets, of which a share `broken` is `mutated` once or twice."""
    make = rng.choices(
        (_composed, _merging, _root, _stagger, _nodes, _selected), (10, 3, 1, 1, 1, 3)
    )[0]
    plan = make(rng)
    if rng.random() < broken:
        for _ in range(rng.choice((1, 1, 2))):
            plan = mutated(rng, plan)
    return plan


def ranks_of(plan: Plan) -> int:
    """The least number of workers that the plan can run on, and two at least."""
    named = [r for rule in (*plan.transfers, *plan.applies) for r in rule.ranks or ()]
    grouped = [r for groups in plan.groups.values() for group in groups for r in group]
    return 1 + max([1, *named, *grouped])


# ---- methods for a run of buckets -----------------------------------------------------------


class _Draft:
    """A plan in the making."""

    def __init__(self, rng: Random, buckets: int, period: int, prologue: int) -> None:
        self.rng = rng
        self.plan = Plan("random", buckets, period=period, prologue=prologue)
        self.transfers: list[Transfer] = []
        self.applies: list[Apply] = []
        self.buffers: dict[str, Buffer] = {}

    def finished(self, *, shuffle: bool = False) -> Plan:
        """The plan, its transfers in the order of their releases (or in any)."""
        transfers = self.transfers
        if shuffle:
            self.rng.shuffle(transfers)
        else:
            transfers.sort(key=lambda t: position(t.after, self.plan.buckets))
        return replace(
            self.plan,
            transfers=tuple(transfers),
            applies=tuple(self.applies),
            buffers=tuple(self.buffers.values()),
        )

    def link(self) -> str:
        return channel(self.rng.choice(("net", "net", "aux")), self.rng.choice((0, 0, 1)))

    def between(self, first: Moment, last: Moment) -> Moment:
        """Any moment of one iteration from the first to the last."""
        low, high = (position(m, self.plan.buckets) for m in (first, last))
        return moment_at(self.rng.randint(low, high), self.plan.buckets)

    def some_phases(self) -> Phases:
        """Some phases, at least one of them in the cycle."""
        often = [p for p in self.plan.phases if self.rng.random() < 0.3]
        return Phases({*often, self.rng.choice(self.plan.cycle)})

    def send(
        self,
        buffer: str,
        run: range,
        after: Moment,
        before: Moment,
        phases: Phases,
        into: str | None = None,
    ) -> None:
        """One average, whole or in slices, in one go or in halves, perhaps over a wire."""
        rng = self.rng
        parts = rng.choice((1, 1, 2, 3)) if len(run) == 1 else 1
        link = self.link()
        for part, width in _cuts(rng, parts):
            payload = Payload(buffer, run, part, parts, width)
            one = Transfer(payload, after, before, phases, link, into=into)
            middle = self._halfway(after, before)
            if into is None and middle is not None and rng.random() < 0.25:
                second = replace(one, verb="all_gather", after=middle, link=self.link())
                self.transfers += [replace(one, verb="reduce_scatter", before=middle), second]
            elif buffer in ("grad", "param", "snapshot") and rng.random() < 0.25:
                self.transfers.append(replace(one, wire=self._wire(buffer)))
            else:
                self.transfers.append(one)

    def _wire(self, buffer: str) -> Wire:
        """Any codec, with what it needs for gradients or for parameters."""
        rng, gradients = self.rng, buffer == "grad"
        codec = rng.choice(CODECS if gradients else [c for c in CODECS if c[0] != "sign"])
        args = dict(codec[1:])
        if not WIRES[codec[0]].linear:
            args["via"] = rng.choice(("gather", "scatter"))
        name = "residual" if gradients else "residual of param"
        error = rng.choice((None, name))
        if error is not None:
            self.buffers[name] = Buffer(name, "grad" if gradients else "param")
        if gradients:
            return Wire(codec[0], tuple(args.items()), error)
        self.buffers["origin"] = Buffer("origin", start="param")
        return Wire(codec[0], tuple(args.items()), error, "origin")

    def handed(self, kind: str, target: int) -> Wire | None:
        """Perhaps a wire for what is sent to one rank: gradients, or what its parameters lack."""
        rng = self.rng
        if rng.random() < 0.5:
            return None
        codec = rng.choice([c for c in CODECS if not WIRES[c[0]].linear])
        if kind == "param":
            name = f"there{target}"
            self.buffers[name] = Buffer(name, start="param")
            return Wire(codec[0], codec[1:], anchor=name)
        name = rng.choice((None, "residual"))
        if name is not None:
            self.buffers[name] = Buffer(name, "grad")
        return Wire(codec[0], codec[1:], name)

    def _halfway(self, after: Moment, before: Moment) -> Moment | None:
        """A moment of the release's own iteration between the two."""
        last = END if before.lag else before
        low, high = (position(m, self.plan.buckets) for m in (after, last))
        places = range(low + 1, high + (before.lag > 0))
        return moment_at(self.rng.choice(places), self.plan.buckets) if places else None


def _cuts(rng: Random, parts: int) -> list[tuple[int, int]]:
    """(first part, how many) of the messages that carry all parts between them."""
    cuts, start = [], 0
    while start < parts:
        width = rng.randint(1, parts - start)
        cuts.append((start, width))
        start += width
    return cuts


def _apply(
    rule: str,
    run: range,
    at: Moment,
    phases: Phases,
    ranks: tuple[int, ...] | None = None,
    **args: Any,
) -> Apply:
    """An apply with its settings."""
    return Apply(rule, run, at, phases, ranks, args=tuple(args.items()))


def _gradients(d: _Draft, run: range) -> None:
    """Averaged gradients, then one step."""
    rng, last, everything = d.rng, Moment("grad", run[-1]), Phases(d.plan.phases)
    style = rng.choice(("step", "step", "forward", "late"))
    into = "landing" if rng.random() < 0.2 else None
    if style == "forward":
        due = rng.choice((STEP, END, Moment("forward", run[-1], 1)))
        at, first = Moment("forward", None, 1), Moment("forward", run[-1], 1)
    elif style == "late" and run[-1] + 1 < d.plan.buckets:
        due = at = first = Moment("grad", rng.randrange(run[-1] + 1, d.plan.buckets))
    else:
        due = at = first = STEP
    start = 0
    while start < len(run):  # messages of neighbours
        stop = rng.randint(start + 1, len(run))
        piece = run[start:stop]
        after = d.between(Moment("grad", piece[-1]), last)
        d.send("grad", piece, after, due, everything, into)
        start = stop
    if into is not None:
        d.buffers[into] = Buffer(into, "grad")
        d.applies.append(_apply("copy", run, first, everything, source=into, target="grad"))
    d.applies.append(Apply("local", run, at, everything))


def _steps(d: _Draft, run: range) -> Moment:
    """Local steps; the moment of the last of them."""
    everything = Phases(d.plan.phases)
    if d.rng.random() < 0.5:
        if len(run) == d.plan.buckets and d.rng.random() < 0.3:
            norm = d.rng.choice((0.1, 100.0))
            early = _apply("clip_early", run, Moment("grad"), everything, buffer="grad", norm=norm)
            d.applies.append(early)
        d.applies.append(Apply("local", run, Moment("grad"), everything))
        return Moment("grad", run[-1])
    some = d.some_phases()
    if d.rng.random() < 0.3 and len(some) < len(everything):
        d.applies.append(Apply("local", run, Moment("grad"), some))
        d.applies.append(Apply("local", run, STEP, Phases(everything - some)))
    else:
        d.applies.append(Apply("local", run, STEP, everything))
    return STEP


def _parameters(d: _Draft, run: range) -> None:
    """Local steps, and averaged parameters in some iterations."""
    stepped, phases = _steps(d, run), d.some_phases()
    early = stepped == STEP and d.rng.random() < 0.3  # averaged before the step
    after = d.between(Moment("grad", run[-1]) if early else stepped, STEP)
    after = Moment("grad", run[-1]) if early else after
    due = STEP if early else d.rng.choice((END, END, Moment("forward", run[-1], 1)))
    kinds = ["param"] + ["state"] * (d.rng.random() < 0.3)
    for kind in kinds:
        d.send(kind, run, after, due, phases)
    if kinds == ["param"] and d.rng.random() < 0.2:
        d.applies.append(Apply("reset", run, END, phases))


def _outer(d: _Draft, run: range) -> None:
    """Local steps, and an outer one on the average."""
    stepped, phases = _steps(d, run), d.some_phases()
    d.buffers["anchor"] = Buffer("anchor", start="param")
    d.buffers["velocity"] = Buffer("velocity")
    d.send("param", run, d.between(stepped, STEP), END, phases)
    nesterov = d.rng.randrange(2)
    d.applies.append(_apply("outer", run, END, phases, rate=0.8, momentum=0.5, nesterov=nesterov))


def _delayed(d: _Draft, run: range) -> None:
    """Local steps, and the average of a snapshot some iterations later."""
    _steps(d, run)
    taken = Phases([d.rng.choice(d.plan.cycle)])
    for name in ("snapshot", "average"):
        d.buffers[name] = Buffer(name, start="param")
    d.applies.append(_apply("copy", run, STEP, taken, source="param", target="snapshot"))
    lag = d.rng.randrange(d.plan.period)
    if lag == 0:
        due = d.rng.choice((END, Moment("forward", run[-1], 1)))
        _landing(d, run, due, taken)
    else:
        later = Phases([d.plan.phase(taken.runs[0][0] + lag)])
        if d.rng.random() < 0.5:
            due = Moment("grad", run[-1], lag)
            at = d.rng.choice((Moment("grad", run[-1]), STEP))
        else:
            due, at = Moment("forward", run[-1], lag + 1), Moment("forward", None, 1)
        _landing(d, run, at, later)
    d.send("snapshot", run, STEP, due, taken, "average")


def _landing(d: _Draft, run: range, at: Moment, phases: Phases) -> None:
    """What becomes of a snapshot's average, perhaps after an outer step on it."""
    if d.rng.random() < 0.6:
        d.applies.append(Apply("delta", run, at, phases))
        return
    d.buffers["anchor"] = Buffer("anchor", start="param")
    d.buffers["velocity"] = Buffer("velocity")
    d.applies.append(_apply("outer", run, at, phases, buffer="average", momentum=0.5))
    if d.rng.random() < 0.5:
        d.applies.append(Apply("delta", run, at, phases))
    else:
        d.applies.append(_apply("blend", run, at, phases, share=0.3))


def _subset(d: _Draft, run: range) -> None:
    """Local steps, and the average of some workers only."""
    _steps(d, run)
    phases, by = d.some_phases(), tuple(d.rng.choice(((2.0, 0.0), (0.0, 2.0), (0.5, 1.5))))
    d.buffers["share"] = Buffer("share")
    d.applies.append(_apply("copy", run, STEP, phases, source="param", target="share"))
    if d.rng.random() < 0.5:
        d.applies.append(_apply("scale", run, STEP, phases, buffer="share", by=by))
    else:
        drawn = {"fraction": d.rng.choice((0.5, 1.0)), "seed": d.rng.randrange(9)}
        more = {"buffer": "share", "samples": (1.0, 3.0), **drawn}
        d.applies.append(_apply("select", run, STEP, phases, **more))
    d.send("share", run, STEP, END, phases)
    d.applies.append(_apply("copy", run, END, phases, source="share", target="param"))


# ---- whole plans ----------------------------------------------------------------------------


def _draft(rng: Random, *, most_buckets: int = 4) -> _Draft:
    return _Draft(rng, rng.randint(1, most_buckets), rng.randint(1, 5), rng.randint(0, 3))


def _composed(rng: Random) -> Plan:
    """Runs of buckets, each with a method of its own."""
    d = _draft(rng)
    methods: Sequence[Callable[[_Draft, range], None]] = (
        *(_gradients,) * 3, *(_parameters,) * 3, _outer, _delayed, _subset,
    )  # fmt: skip
    start = 0
    while start < d.plan.buckets:
        stop = rng.randint(start + 1, d.plan.buckets)
        rng.choice(methods)(d, range(start, stop))
        start = stop
    return d.finished(shuffle=rng.random() < 0.1)


def _selected(rng: Random) -> Plan:
    """Local steps, and averages that a vote decides on."""
    d = _draft(rng)
    n, everything = d.plan.buckets, Phases(d.plan.phases)
    per_bucket, ago = rng.random() < 0.5, int(rng.random() < 0.3)
    votes = []
    for b in range(n) if per_bucket else [n - 1]:
        run = range(b, b + 1) if per_bucket else range(n)
        taken = Moment("grad", n - 1)
        due = rng.choice((STEP, STEP, END))
        args = (("threshold", rng.choice((0.1, 1.0, 4.0))),)
        known, about = replace(due, lag=ago), run if per_bucket else None
        votes.append(Vote(f"sync{b}", "changed", taken, known, everything, args, about))
        condition: dict[str, Any] = {"when": f"sync{b}", "ago": ago}
        next_ = Moment("forward", run[-1], 1)
        before = rng.choice((END, next_)) if due == STEP else next_
        payload = Payload("param", run)
        d.transfers.append(Transfer(payload, due, before, everything, d.link(), **condition))
        if rng.random() < 0.3 and before == END:
            d.applies.append(Apply("reset", run, END, everything, **condition))
    if rng.random() < 0.5:
        d.applies.insert(0, local(n, STEP, everything))
    else:  # the gradients are used up when the votes are taken
        measured = Apply("measure", range(n), Moment("grad"), everything)
        d.applies[:0] = [measured, local(n, Moment("grad"), everything)]
    return replace(d.finished(), votes=tuple(votes))


def _merging(rng: Random) -> Plan:
    """Gradients added up over some iterations, sent in any iteration before they are applied."""
    d = _draft(rng, most_buckets=3)
    plan = d.plan
    closes = d.some_phases()
    merge = rng.choice(("sum", "mean"))
    everything = range(plan.buckets)
    d.applies = [
        _apply("local", everything, STEP, closes, age=1, merge=merge),
        Apply("close", everything, END, closes),
    ]
    d.buffers["grad"] = replace(GRAD, copies=2)
    windows = Windows(replace(plan, applies=tuple(d.applies)))
    for b in everything:
        parts = rng.choice((1, 1, 2))
        for part, width in _cuts(rng, parts):
            piece = Payload("grad", range(b, b + 1), part, parts, width)
            d.transfers += _journeys(d, windows, piece)
    return d.finished()


def _journeys(d: _Draft, windows: Windows, piece: Payload) -> list[Transfer]:
    """One slice's transfers: one in the prologue or the cycle for each window that closes."""
    rng, plan, found = d.rng, d.plan, {}
    link = d.link()
    for closed in range(plan.prologue + 2 * plan.period):
        if not windows.closes_window(closed):
            continue
        applied = closed + 1
        while not windows.closes_window(applied):
            applied += 1
        if plan.phase(closed) in [phase for phase, _ in found.values()] and closed >= plan.prologue:
            continue  # the cycle's transfer carries this window too
        sent = rng.randint(closed, applied)
        while plan.phase(sent) != sent and sent > closed:
            sent -= 1  # what the cycle repeats would be sent in its first round too
        after = Moment("forward", rng.choice((None, 0))) if sent > closed else None
        age = int(sent > closed)
        t = Transfer(
            replace(piece, age=age),
            after or Moment("grad", piece.buckets[-1]),
            Moment("step", lag=applied - sent),
            Phases([plan.phase(sent)]),
            link,
        )
        found[closed] = plan.phase(closed), t
    return [t for _, t in found.values()]


def _root(rng: Random) -> Plan:
    """Every worker sends its gradients to rank 0, which steps and sends its parameters."""
    d, workers = _draft(rng, most_buckets=2), rng.randint(2, 3)
    n, everything = d.plan.buckets, Phases(d.plan.phases)
    for b in range(n):
        one = range(b, b + 1)
        ready, next_ = Moment("grad", b), Moment("forward", b, 1)
        for r in range(1, workers):
            d.buffers[f"from{r}"] = Buffer(f"from{r}", "grad")
            up = Payload("grad", one)
            sent = Transfer(up, ready, STEP, everything, "net", "send", (r, 0), into=f"from{r}")
            d.transfers.append(replace(sent, wire=d.handed("grad", 0)))
            add = _apply("add", one, STEP, everything, (0,), source=f"from{r}", target="grad")
            d.applies.append(add)
            down = Payload("param", one)
            back = Transfer(down, STEP, next_, everything, channel("net", 1), "send", (0, r))
            d.transfers.append(replace(back, wire=d.handed("param", r)))
    d.applies.append(_apply("local", range(n), STEP, everything, (0,), scale=1 / workers))
    others = tuple(range(1, workers))
    d.applies.append(_apply("clear", range(n), END, everything, others, buffer="grad"))
    return d.finished()


def _stagger(rng: Random) -> Plan:
    """Cyclic data parallelism: each rank adds its gradient to a sum and passes it on."""
    d = _draft(rng, most_buckets=3)
    n, everything = d.plan.buckets, Phases(d.plan.phases)
    if n == 1:
        return _root(rng)
    d.buffers["sum"] = Buffer("sum", "grad")
    late, last = rng.random() < 0.5, (n - 1,)  # whether the last uses older parameters, too
    if late:
        d.buffers["older"] = Buffer("older", start="param")
    for b in range(n):
        one, ready = range(b, b + 1), Moment("grad", b)
        if late:
            d.applies.append(
                _apply("swap", one, Moment("forward", b), everything, last, a="param", b="older")
            )
        for r in range(n):
            if r:
                add = _apply("add", one, ready, everything, (r,), source="sum", target="grad")
                d.applies.append(add)
            if r < n - 1:
                grads, params = Payload("grad", one), Payload("param", one)
                up = Transfer(grads, ready, ready, everything, "net", "send", (r, r + 1), "sum")
                d.transfers.append(replace(up, wire=d.handed("grad", r + 1)))
                d.applies.append(_apply("clear", one, END, everything, (r,), buffer="grad"))
                next_ = Moment("forward", b, 1 if b <= r else 2)
                ranks, link = (n - 1, r), channel("net", 1)
                down = Transfer(params, ready, next_, everything, link, "send", ranks)
                d.transfers.append(replace(down, wire=d.handed("param", r)))
        if late:
            d.applies += [
                _apply("swap", one, ready, everything, last, a="older", b="param"),
                _apply("copy", one, ready, everything, last, source="param", target="older"),
            ]
        if rng.random() < 0.3:
            norm = rng.choice((0.1, 100.0))
            d.applies.append(_apply("clip", one, ready, everything, last, buffer="grad", norm=norm))
        d.applies.append(_apply("local", one, ready, everything, last, scale=1 / n))
    return d.finished()


def _nodes(rng: Random) -> Plan:
    """Two nodes of two workers: gradients averaged within the node, then between nodes."""
    d = _draft(rng)
    n, everything = d.plan.buckets, Phases(d.plan.phases)
    for b in range(n):
        payload = Payload("grad", range(b, b + 1))
        middle = d.between(Moment("grad", b), STEP)
        split = middle not in (STEP, Moment("grad", b))
        before = middle if split else STEP
        node, net = (channel(link, rng.choice((0, 0, 1))) for link in ("node", "net"))
        inner = Transfer(payload, Moment("grad", b), before, everything, node)
        outer = Transfer(payload, middle, STEP, everything, net)
        if not split:
            d.transfers.append(replace(inner, link="all"))
        elif rng.random() < 0.5:
            d.transfers += [inner, outer]
        else:
            last = Moment("forward", b, 1)
            d.transfers += [
                replace(inner, verb="reduce_scatter"),
                outer,
                replace(inner, verb="all_gather", after=STEP, before=last),
            ]
    d.applies.append(local(n, Moment("forward", lag=1), everything))
    groups = {"node": ((0, 1), (2, 3)), "net": ((0, 2), (1, 3))}
    return replace(d.finished(), groups=groups)


# ---- what breaks a plan, or not -------------------------------------------------------------


def mutated(rng: Random, plan: Plan) -> Plan:
    """The plan with one thing changed."""
    change = rng.choice(
        (_moved_transfer, _moved_transfer, _moved_transfer, _moved_apply, _moved_apply,
         _without, _other_phases, _other_payload, _swapped, _other_link, _moved_vote, _gated)
    )  # fmt: skip
    return change(rng, plan)


def _any_moment(rng: Random, plan: Plan) -> Moment:
    return moment_at(rng.randrange(2 * plan.buckets + 2), plan.buckets)


def _nearby(rng: Random, plan: Plan, moment: Moment) -> Moment:
    """One or two moments off."""
    size = 2 * plan.buckets + 2
    place = position(moment, plan.buckets) + moment.lag * size + rng.choice((-2, -1, 1, 2))
    place = max(place, 0)
    return replace(moment_at(place % size, plan.buckets), lag=place // size)


def _moved(rng: Random, plan: Plan, moment: Moment, *, own: bool = True) -> Moment:
    """Another moment; `own`: of the same lag."""
    if rng.random() < 0.5:
        return replace(_any_moment(rng, plan), lag=moment.lag)
    near = _nearby(rng, plan, moment)
    return replace(near, lag=moment.lag) if own else near


def _moved_transfer(rng: Random, plan: Plan) -> Plan:
    def change(t: Transfer) -> Transfer:
        if rng.random() < 0.5:
            return replace(t, after=_moved(rng, plan, t.after))
        return replace(t, before=_moved(rng, plan, t.before, own=False))

    return _with_transfer(rng, plan, change)


def _moved_apply(rng: Random, plan: Plan) -> Plan:
    if not plan.applies:
        return plan
    applies = list(plan.applies)
    i = rng.randrange(len(applies))
    applies[i] = replace(applies[i], at=_moved(rng, plan, applies[i].at))
    return replace(plan, applies=tuple(applies))


def _without(rng: Random, plan: Plan) -> Plan:
    rules = [*plan.transfers, *plan.applies]
    if not rules:
        return plan
    gone = rng.choice(rules)
    return replace(
        plan,
        transfers=tuple(t for t in plan.transfers if t is not gone),
        applies=tuple(a for a in plan.applies if a is not gone),
    )


def _other_phases(rng: Random, plan: Plan) -> Plan:
    phases = Phases(p for p in plan.phases if rng.random() < 0.7) or Phases(plan.phases)
    if rng.random() < 0.5 and plan.applies:
        applies = list(plan.applies)
        i = rng.randrange(len(applies))
        applies[i] = replace(applies[i], phases=phases)
        return replace(plan, applies=tuple(applies))
    return _with_transfer(rng, plan, lambda t: replace(t, phases=phases))


def _other_payload(rng: Random, plan: Plan) -> Plan:
    copies = plan.all_buffers["grad"].copies

    def change(t: Transfer) -> Transfer:
        p = t.payload
        choices = [
            replace(p, age=rng.randrange(copies) if p.buffer == "grad" else 0),
            replace(p, buffer=rng.choice(("grad", "param", "state")), age=0),
        ]
        if len(p.buckets) == 1:
            parts = rng.choice((1, 2, 3))
            choices.append(replace(p, part=rng.randrange(parts), parts=parts, width=1))
        return replace(t, payload=rng.choice(choices))

    return _with_transfer(rng, plan, change)


def _swapped(rng: Random, plan: Plan) -> Plan:
    transfers, applies = list(plan.transfers), list(plan.applies)
    rules: list[Any] = rng.choice((transfers, applies))
    if len(rules) > 1:
        i, j = rng.sample(range(len(rules)), 2)
        rules[i], rules[j] = rules[j], rules[i]
    return replace(plan, transfers=tuple(transfers), applies=tuple(applies))


def _other_link(rng: Random, plan: Plan) -> Plan:
    link = channel(rng.choice(("net", "aux")), rng.choice((0, 1, 2)))
    return _with_transfer(rng, plan, lambda t: replace(t, link=link))


def _moved_vote(rng: Random, plan: Plan) -> Plan:
    if not plan.votes:
        return _moved_transfer(rng, plan)
    votes = list(plan.votes)
    i = rng.randrange(len(votes))
    if rng.random() < 0.5:
        votes[i] = replace(votes[i], at=_moved(rng, plan, votes[i].at))
    else:
        votes[i] = replace(votes[i], due=_moved(rng, plan, votes[i].due, own=False))
    return replace(plan, votes=tuple(votes))


def _gated(rng: Random, plan: Plan) -> Plan:
    """Something more depends on a vote."""
    if not plan.votes:
        return _swapped(rng, plan)
    when = rng.choice(plan.votes).name
    if rng.random() < 0.5 and plan.applies:
        applies = list(plan.applies)
        i = rng.randrange(len(applies))
        applies[i] = replace(applies[i], when=when)
        return replace(plan, applies=tuple(applies))
    return _with_transfer(rng, plan, lambda t: replace(t, when=when))


def _with_transfer(rng: Random, plan: Plan, change: Callable[[Transfer], Transfer]) -> Plan:
    if not plan.transfers:
        return plan
    transfers = list(plan.transfers)
    i = rng.randrange(len(transfers))
    transfers[i] = change(transfers[i])
    return replace(plan, transfers=tuple(transfers))
