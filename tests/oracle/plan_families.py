"""Families as plans, and as the ten lines of equations that each stands for.

Every plan trains a quadratic of N buckets on K workers with SGD and momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offbeat.plan import Apply, Buffer, Moment, Phases, Plan, Vote, Wire, local, transfer

N, K, T, H, SIZE = 3, 4, 12, 3, 4
ALL, FIRST = range(N), [0]
STEP, END = Moment("step"), Moment("end")
RATE, MOMENTUM, THRESHOLD, FRACTION = 0.1, 0.9, 1.0, 0.5
BY = (2.0, 0.0, 0.0, 2.0)

_rng = np.random.default_rng(1)
START = _rng.normal(size=(N, SIZE))
CENTER = _rng.normal(size=(K, T, N, SIZE))
SLOPE = _rng.uniform(0.5, 1.5, size=(K, N, SIZE))

Weights = np.ndarray  # (bucket, element) of one worker, (worker, bucket, element) of all


def gradient(rank: int, iteration: int, weights: Weights) -> Weights:
    return SLOPE[rank] * (weights - CENTER[rank, iteration])


# ---- equations ------------------------------------------------------------------------------


class World:
    """All workers' weights and momentum; what every worker has after each iteration."""

    def __init__(self, workers: int = K) -> None:
        self.w = np.repeat(START[None], workers, axis=0)
        self.m = np.zeros_like(self.w)
        self.history: list[Weights] = []

    def gradients(self, i: int) -> Weights:
        return np.array([gradient(r, i, w) for r, w in enumerate(self.w)])

    def step(self, g: Weights) -> None:
        self.m = MOMENTUM * self.m + g
        self.w = self.w - RATE * self.m

    def average(self, buckets: list[int] | range = ALL) -> None:
        for b in buckets:
            self.w[:, b] = self.w[:, b].mean(axis=0)


def synchronous(world: World, i: int) -> None:
    world.step(np.repeat(world.gradients(i).mean(axis=0)[None], len(world.w), axis=0))


def dreamddp(world: World, i: int) -> None:
    world.step(world.gradients(i))
    world.average([b for b in ALL if b % H == i % H])


class Merged:
    def __init__(self) -> None:
        self.added, self.closed = np.zeros((K, N, SIZE)), None

    def __call__(self, world: World, i: int) -> None:
        self.added = self.added + world.gradients(i)
        if i % 2:
            if self.closed is not None:
                world.step(np.repeat(self.closed.mean(axis=0)[None], K, axis=0))
            self.closed, self.added = self.added, np.zeros_like(self.added)


class DiLoCo:
    def __init__(self) -> None:
        self.anchor, self.velocity = START.copy(), np.zeros_like(START)

    def __call__(self, world: World, i: int) -> None:
        world.step(world.gradients(i))
        if i % H == H - 1:
            change = self.anchor - world.w.mean(axis=0)
            self.velocity = 0.9 * self.velocity + change
            self.anchor = self.anchor - 0.7 * (change + 0.9 * self.velocity)
            world.w[:] = self.anchor


class TopK:
    def __init__(self) -> None:
        self.lost = np.zeros((K, N, SIZE))

    def __call__(self, world: World, i: int) -> None:
        wanted = world.gradients(i) + self.lost
        limit = np.sort(abs(wanted), axis=-1)[..., SIZE // 2 :][..., :1]
        sent = np.where(abs(wanted) >= limit, wanted, 0)
        self.lost = wanted - sent
        world.step(np.repeat(sent.mean(axis=0)[None], K, axis=0))


class SelSync:
    def __init__(self) -> None:
        self.last: list[float] | None = None
        self.votes: list[bool] = []

    def __call__(self, world: World, i: int) -> None:
        g = world.gradients(i)
        norms = [float((x**2).sum()) for x in g]
        last = self.last or [0.0] * K
        self.votes.append(
            any(not o or abs(n - o) / o >= THRESHOLD for n, o in zip(norms, last, strict=True))
        )
        self.last = norms
        world.step(self.applied(g))
        if self.votes[-1]:
            world.average()

    def applied(self, g: Weights) -> Weights:
        return g


class Paired(SelSync):
    """Gradients averaged within pairs of workers."""

    def applied(self, g: Weights) -> Weights:
        return np.repeat(g.reshape(K // 2, 2, N, SIZE).mean(axis=1), 2, axis=0)


class ByLayer:
    """Each bucket by its own change of the iteration before."""

    def __init__(self) -> None:
        self.last: Weights | None = None
        self.chosen = list(ALL)

    def __call__(self, world: World, i: int) -> None:
        g = world.gradients(i)
        world.step(g)
        world.average(self.chosen)
        norms = (g**2).sum(axis=2)
        if self.last is not None:
            changes = abs(norms - self.last) / self.last
            self.chosen = [b for b in ALL if (changes[:, b] >= THRESHOLD).any()]
        self.last = norms


class Voted(SelSync):
    """Gradients are averaged if a vote says so, then all step."""

    def __call__(self, world: World, i: int) -> None:
        before = world.w.copy(), world.m.copy()
        super().__call__(world, i)
        world.w, world.m = before
        g = world.gradients(i)
        if self.votes[-1]:
            g = np.repeat(g.mean(axis=0)[None], len(g), axis=0)
        world.step(g)


class Delayed:
    def __init__(self) -> None:
        self.snapshot = None

    def __call__(self, world: World, i: int) -> None:
        if self.snapshot is not None:
            world.w = world.w + self.snapshot.mean(axis=0) - self.snapshot
            self.snapshot = None
        world.step(world.gradients(i))
        if i % H == H - 1:
            self.snapshot = world.w.copy()


def subset(world: World, i: int) -> None:
    world.step(world.gradients(i))
    if i % H == H - 1:
        world.w[:] = (world.w[0] + world.w[3]) / 2


class Cyclic:
    """Cyclic data parallelism, v2: worker r of N uses this iteration's weights where it already
    has them (buckets 0..r), else the last one's; one step with the mean of all gradients."""

    def __init__(self) -> None:
        self.now, self.before, self.m = START.copy(), START.copy(), np.zeros_like(START)

    def __call__(self, world: World, i: int) -> None:
        total = np.zeros_like(START)
        for r in range(N):
            used = [self.now[b] if b <= r else self.before[b] for b in ALL]
            total += gradient(r, i, np.array(used))
        self.m = MOMENTUM * self.m + total / N
        self.before, self.now = self.now, self.now - RATE * self.m
        world.w[-1] = self.now


# ---- plans ----------------------------------------------------------------------------------


def one(b: int) -> range:
    return range(b, b + 1)


def move(buffer, run, after, before, phases=FIRST, link="net", **more):
    return transfer(buffer, run, after=after, before=before, phases=phases, link=link, **more)


def planned(name, transfers, applies, *, buffers=(), votes=(), period=1, prologue=0, groups=None):
    return Plan(
        name,
        N,
        tuple(transfers),
        tuple(applies),
        votes=tuple(votes),
        buffers=tuple(buffers),
        groups=groups or {},
        period=period,
        prologue=prologue,
    )


def wfbp_plan() -> Plan:
    sent = [move("grad", one(b), Moment("grad", b), STEP) for b in ALL]
    return planned("wfbp", sent, [local(N, STEP, FIRST)])


def dear_plan() -> Plan:
    """All-gathers on a channel of their own, so both halves may be on the network at once."""
    scattered = [move("grad", one(b), Moment("grad", b), STEP, verb="reduce_scatter") for b in ALL]
    gathered = [
        move("grad", one(b), STEP, Moment("forward", b, 1), link="net#1", verb="all_gather")
        for b in reversed(ALL)
    ]
    return planned("dear", scattered + gathered, [local(N, Moment("forward", lag=1), FIRST)])


def dreamddp_plan() -> Plan:
    sent = [move("param", one(b), Moment("grad", b), END, [b % H]) for b in ALL]
    return planned("dreamddp", sent, [local(N, Moment("grad"), range(H))], period=H)


def deft_plan() -> Plan:
    sent = [move("grad", ALL, Moment("forward"), Moment("step", lag=1), [2], age=1)]
    applies = [local(N, STEP, [3], age=1), Apply("close", ALL, END, Phases([1, 3]))]
    copies = [Buffer("grad", "grad", copies=2)]
    return planned("deft", sent, applies, buffers=copies, period=2, prologue=2)


def diloco_plan() -> Plan:
    applies = [local(N, STEP, range(H)), Apply("outer", ALL, END, Phases([H - 1]))]
    buffers = [Buffer("anchor", start="param"), Buffer("velocity")]
    sent = [move("param", ALL, STEP, END, [H - 1])]
    return planned("diloco", sent, applies, buffers=buffers, period=H)


def topk_plan() -> Plan:
    wire = Wire("topk", {"fraction": FRACTION}, "residual")
    sent = [move("grad", one(b), Moment("grad", b), STEP, wire=wire) for b in ALL]
    return planned("topk", sent, [local(N, STEP, FIRST)], buffers=[Buffer("residual", "grad")])


def selsync_plan() -> Plan:
    args = {"threshold": THRESHOLD}
    vote = Vote("sync", "changed", Moment("grad", N - 1), STEP, Phases(FIRST), args)
    sent = [move("param", ALL, STEP, END, when="sync")]
    return planned("selsync", sent, [local(N, STEP, FIRST)], votes=[vote])


def layers_plan() -> Plan:
    votes, sent = [], []
    for b in ALL:
        args = {"threshold": THRESHOLD}
        due = Moment("grad", b, 1)
        at, name = Moment("grad", N - 1), f"layer {b}"
        votes.append(Vote(name, "changed", at, due, Phases(FIRST), args, one(b)))
        sent.append(move("param", one(b), Moment("grad", b), END, when=name, ago=1))
    applies = [
        Apply("measure", ALL, Moment("grad"), Phases(FIRST)),
        local(N, Moment("grad"), FIRST),
    ]
    return planned("layers", sent, applies, votes=votes)


def voted_plan() -> Plan:
    plan = selsync_plan()
    sent = [move("grad", ALL, STEP, END, when="sync")]
    return planned("voted", sent, [local(N, END, FIRST)], votes=plan.votes)


def delayed_plan() -> Plan:
    args, last = {"source": "param", "target": "snapshot"}, [H - 1]
    due = Moment("forward", N - 1, 1)
    sent = [move("snapshot", ALL, STEP, due, last, into="average")]
    applies = [
        local(N, STEP, range(H)),
        Apply("copy", ALL, STEP, Phases(last), args=args),
        Apply("delta", ALL, due, Phases(last)),
    ]
    buffers = [Buffer("snapshot"), Buffer("average")]
    return planned("delayed", sent, applies, buffers=buffers, period=H)


def fedavg_plan() -> Plan:
    """Workers 0 and 3 count, the others take what comes out."""
    last = Phases([H - 1])
    applies = [
        local(N, STEP, range(H)),
        Apply("copy", ALL, STEP, last, args={"source": "param", "target": "share"}),
        Apply("scale", ALL, STEP, last, args={"buffer": "share", "by": BY}),
        Apply("copy", ALL, END, last, args={"source": "share", "target": "param"}),
    ]
    sent = [move("share", ALL, STEP, END, last)]
    return planned("fedavg", sent, applies, buffers=[Buffer("share")], period=H)


def nodes_plan() -> Plan:
    """Two nodes of two workers: half of a mean within the node, one between nodes, the rest."""
    scattered, averaged, gathered = [], [], []
    for b in ALL:
        ready, next_ = Moment("grad", b), Moment("forward", b, 1)
        scattered.append(move("grad", one(b), ready, STEP, link="node", verb="reduce_scatter"))
        averaged.append(move("grad", one(b), STEP, END))
        gathered.append(move("grad", one(b), END, next_, link="node", verb="all_gather"))
    sent = scattered + averaged + gathered
    groups = {"node": ((0, 1), (2, 3)), "net": ((0, 2), (1, 3))}
    return planned("nodes", sent, [local(N, Moment("forward", lag=1), FIRST)], groups=groups)


def paired_plan() -> Plan:
    """Groups on the first link, votes and averages over all ranks."""
    plan = selsync_plan()
    sent = [
        move("grad", ALL, STEP, END, link="net"),
        move("param", ALL, END, Moment("forward", N - 1, 1), link="all", when="sync"),
    ]
    groups = {"net": ((0, 1), (2, 3))}
    return planned("paired", sent, [local(N, END, FIRST)], votes=plan.votes, groups=groups)


def cyclic_plan() -> Plan:
    sent, applies, always = [], [], Phases(FIRST)
    for b in ALL:
        ready = Moment("grad", b)
        for r in range(N):
            if r:
                args = {"source": "sum", "target": "grad"}
                applies.append(Apply("add", one(b), ready, always, ranks=(r,), args=args))
            if r < N - 1:
                more = {"verb": "send", "ranks": (r, r + 1), "into": "sum"}
                sent.append(move("grad", one(b), ready, ready, **more))
                clear = {"buffer": "grad"}
                applies.append(Apply("clear", one(b), END, always, ranks=(r,), args=clear))
                next_ = Moment("forward", b, 1 if b <= r else 2)
                more = {"verb": "send", "ranks": (N - 1, r), "link": "net#1"}
                sent.append(move("param", one(b), ready, next_, **more))
        args = {"scale": 1 / N}
        applies.append(Apply("local", one(b), ready, always, ranks=(N - 1,), args=args))
    return planned("cyclic", sent, applies, buffers=[Buffer("sum", "grad")])


@dataclass(frozen=True)
class Family:
    plan: Plan
    equations: Callable[[], Callable[[World, int], None]]
    workers: int = K
    compared: tuple[int, ...] = tuple(range(K))  # workers whose weights have the equations


FAMILIES = {
    family.plan.strategy: family
    for family in (
        Family(wfbp_plan(), lambda: synchronous),
        Family(dear_plan(), lambda: synchronous),
        Family(dreamddp_plan(), lambda: dreamddp),
        Family(deft_plan(), Merged),
        Family(diloco_plan(), DiLoCo),
        Family(topk_plan(), TopK),
        Family(selsync_plan(), SelSync),
        Family(layers_plan(), ByLayer),
        Family(voted_plan(), Voted),
        Family(delayed_plan(), Delayed),
        Family(fedavg_plan(), lambda: subset),
        Family(nodes_plan(), lambda: synchronous),
        Family(paired_plan(), Paired),
        Family(cyclic_plan(), Cyclic, workers=N, compared=(N - 1,)),
    )
}
