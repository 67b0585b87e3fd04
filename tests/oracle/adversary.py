"""A slow, separate interpreter of plans that is as unkind as a real machine may be.

It shares no code with `core/plan/program.py` and `core/verify/interpreter.py`. Everything works in
place: a collective takes each rank's payload at any time after that rank's release, may leave
rubbish in its place, and writes the result at any time before that rank's wait returns. Forwards
read, and gradients arrive, in any order that the moments allow, each gradient being added to
storage as it comes. Ranks take turns at random, and some do early what their next forward waits
for. Only what is no longer the payload itself (sends, wires, landing buffers) is copied at the
release and put into its place by the wait.

If every outcome is the same, nobody has touched what is in flight.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from offbeat.core.codecs import codec, way
from offbeat.core.rules.select import draw_samples
from offbeat.plan import Apply, Moment, Plan, Transfer, Vote

Array = np.ndarray
MOMENTUM, RATE = 0.9, 0.1


class StuckError(Exception):
    """No rank can go on."""


@dataclass
class Problem:
    """What is trained: a quadratic per element, another one in every iteration and rank."""

    sizes: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        self.offsets = [0]
        for size in self.sizes:
            self.offsets.append(self.offsets[-1] + size)
        self.start = np.random.default_rng(self.seed).normal(size=self.offsets[-1])
        self._known: dict[tuple[int, int], tuple[Array, Array]] = {}

    def gradient(self, rank: int, iteration: int, run: range, weights: Array) -> Array:
        if (rank, iteration) not in self._known:
            rng = np.random.default_rng((self.seed, rank, iteration))
            size = self.offsets[-1]
            self._known[rank, iteration] = rng.uniform(0.5, 1.5, size), rng.normal(size=size)
        slope, center = self._known[rank, iteration]
        at = slice(self.offsets[run.start], self.offsets[run.stop])
        return slope[at] * (weights - center[at])


@dataclass
class Flight:
    """One transfer of one iteration among some ranks."""

    transfer: Transfer
    iteration: int
    ranks: tuple[int, ...]
    released: dict[int, Array | None] = field(default_factory=dict)  # views in place, or copies
    inputs: dict[int, Array] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)
    passed: bool = False
    result: Array | None = None


class Machine:
    """All ranks of a job. `lazy`: how unlikely it is that a message moves while a rank could."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        ranks: int,
        *,
        seed: int,
        lazy: float = 0.5,
        flushes: float = 0.0,
        say: Callable[[str, int, int], bool] | None = None,
    ) -> None:
        self.plan, self.problem, self.rng = plan, problem, random.Random(seed)
        self.lazy, self.flushes, self.say = lazy, flushes, say
        self.world = range(ranks)
        size = problem.offsets[-1]
        self.store: list[dict[str, list[Array]]] = []
        for _ in self.world:
            mine = {}
            for b in plan.all_buffers.values():
                first = problem.start if b.start == "param" else np.zeros(size)
                mine[b.name] = [first.copy() for _ in range(b.copies)]
            self.store.append(mine)
        self.added = [[np.zeros(size) for _ in s["grad"]] for s in self.store]
        self.said: dict[tuple[str, int], dict[int, bool]] = defaultdict(dict)
        self.norms: dict[tuple[int, str], float] = {}
        self.measured: dict[tuple[int, int], float] = {}
        self.kept: list[dict[str, dict]] = [{} for _ in self.world]  # what codecs remember
        self.rounds: dict[tuple[int, str], int] = defaultdict(int)
        self.early = [[np.inf, np.inf] for _ in self.world]  # norms: of the last iteration, so far
        self.flights: dict[tuple[int, int, int], Flight] = {}
        self.queues: dict[tuple[str, int], list[Flight]] = defaultdict(list)
        rules = [*plan.transfers, *plan.applies, *plan.votes]
        self.lag = max([0, *(_deadline(rule).lag for rule in rules)])
        self.history: dict[tuple[int, int, int], Array] = {}

    def run(self, iterations: int) -> dict[tuple[int, int, int], Array]:
        """The weights that (rank, iteration, bucket) was trained with."""
        lives = {rank: self._life(rank, iterations) for rank in self.world}
        blocked: set[int] = set()
        while lives:
            moves = self._moves()
            free = [rank for rank in lives if rank not in blocked]
            if moves and (not free or self.rng.random() > self.lazy):
                self._move(*self.rng.choice(moves))
                blocked.clear()
                continue
            if not free:
                raise StuckError
            rank = self.rng.choice(free)
            for _ in range(self.rng.choice((1, 1, 3, 20))):
                state = next(lives[rank], "over")
                if state == "blocked":
                    blocked.add(rank)
                    break
                blocked.clear()
                if state == "over":
                    del lives[rank]
                    break
        return self.history

    # ---- one rank ---------------------------------------------------------------------------

    def _life(self, rank: int, iterations: int) -> Iterator[str]:
        n, flushed = self.plan.buckets, False
        for i in range(iterations):
            self._enqueue(rank, i)
            yield "moved"
            seen: dict[int, Array] = {}
            to_read: list[int] = []
            for b in reversed(range(n)):
                yield from self._moment(rank, i, ("forward", b), skip_late=flushed)
                to_read.append(b)
                self._read_some(rank, to_read, seen, self.rng.choice((0, 1, n)))
                yield "moved"
            self._read_some(rank, to_read, seen, n)
            order = self.rng.sample(range(n), n)
            copy = self.store[rank]["grad"][0]
            self.added[rank][0] += 1
            for b in range(n):
                while b not in [c for c in range(n) if c not in order]:
                    c = order.pop(0)
                    at = self._span(range(c, c + 1))
                    now = self.store[rank]["param"][0][at]
                    mixed = 0.5 * seen[c] + 0.5 * now
                    self.history[rank, i, c] = mixed
                    copy[at] += self.problem.gradient(rank, i, range(c, c + 1), mixed)
                    yield "moved"
                yield from self._moment(rank, i, ("grad", b))
            yield from self._moment(rank, i, ("step", None))
            yield from self._moment(rank, i, ("end", None))
            flushed = i + 1 < iterations and self.rng.random() < self.flushes
            if flushed:
                for b in reversed(range(n)):
                    yield from self._moment(rank, i + 1, ("forward", b), only_late=True)

    def _read_some(self, rank: int, todo: list[int], seen: dict[int, Array], count: int) -> None:
        for _ in range(min(count, len(todo))):
            b = todo.pop(self.rng.randrange(len(todo)))
            seen[b] = self.store[rank]["param"][0][self._span(range(b, b + 1))].copy()

    def _moment(  # noqa: C901
        self,
        rank: int,
        i: int,
        moment: tuple[str, int | None],
        *,
        only_late: bool = False,
        skip_late: bool = False,
    ) -> Iterator[str]:
        plan = self.plan
        for lag in range(self.lag + 1):
            j = i - lag
            if j < 0 or (only_late and lag == 0) or (skip_late and lag > 0):
                continue
            for index, t in enumerate(plan.transfers):
                takes = t.ranks is None or t.ranks[1] == rank
                if takes and self._on(t, j) and t.before.lag == lag and self._at(t.before, moment):
                    yield from self._wait(rank, self._flight(index, t, rank, j))
        for lag in range(self.lag + 1):
            j = i - lag
            if j < 0 or (only_late and lag == 0) or (skip_late and lag > 0):
                continue
            for v in plan.votes:
                if self._on(v, j) and v.due.lag == lag and self._at(v.due, moment):
                    while len(self.said[v.name, j]) < len(self.world):
                        yield "blocked"
            for a in plan.applies:
                if a.ranks is not None and rank not in a.ranks:
                    continue
                if not self._on(a, j) or a.at.lag != lag:
                    continue
                for buckets in self._buckets_at(a, moment):
                    if self._yes(a, j):
                        self._apply(rank, a, buckets)
                        yield "moved"
        if only_late:
            return
        for v in plan.votes:
            if self._on(v, i) and self._at(v.at, moment):
                self.said[v.name, i][rank] = self._say(rank, v, i)
        for index, t in enumerate(plan.transfers):
            gives = t.ranks is None or t.ranks[0] == rank
            if gives and self._on(t, i) and self._at(t.after, moment):
                self._release(rank, self._flight(index, t, rank, i))
                yield "moved"

    def _on(self, rule: Transfer | Apply | Vote, iteration: int) -> bool:
        return self.plan.phase(iteration) in set(rule.phases)

    def _at(self, named: Moment, moment: tuple[str, int | None]) -> bool:
        bucket = named.bucket
        if bucket is None and named.point in ("forward", "grad"):
            bucket = self.plan.buckets - 1
        return (named.point, bucket) == moment

    def _buckets_at(self, a: Apply, moment: tuple[str, int | None]) -> list[range]:
        if a.at.bucket is None and a.at.point in ("forward", "grad"):
            own = a.at.point == moment[0] and moment[1] in a.buckets
            return [range(moment[1], moment[1] + 1)] if own else []
        return [a.buckets] if self._at(a.at, moment) else []

    def _yes(self, rule: Transfer | Apply, iteration: int) -> bool:
        if rule.when is None or iteration < rule.ago:
            return True
        said = self.said[rule.when, iteration - rule.ago]
        assert len(said) == len(self.world), "asked before it is due"
        return any(said.values())

    # ---- messages ---------------------------------------------------------------------------

    def _enqueue(self, rank: int, i: int) -> None:
        for index, t in enumerate(self.plan.transfers):
            if self._on(t, i) and (t.ranks is None or rank in t.ranks):
                flight = self._flight(index, t, rank, i)
                self.queues[t.link, rank].append(flight)
                if t.ranks is not None and rank == t.ranks[1]:
                    flight.released[rank] = None

    def _flight(self, index: int, t: Transfer, rank: int, i: int) -> Flight:
        groups = self.plan.groups.get(t.link.partition("#")[0], ())
        group = next((g for g in groups if rank in g), tuple(self.world))
        ranks = t.ranks or group
        return self.flights.setdefault((index, i, ranks[0]), Flight(t, i, ranks))

    def _release(self, rank: int, f: Flight) -> None:
        t = f.transfer
        if not self._yes(t, f.iteration):
            f.passed = True
            f.released[rank] = None
            return
        at = self._slice(t)
        view = self.store[rank][t.payload.buffer][t.payload.age][at]
        if t.verb != "send" and t.wire is None and t.into is None:
            f.released[rank] = view
            return
        given = view.copy()
        if t.wire is not None and t.wire.anchor is not None and t.verb != "send":
            given = given - self.store[rank][t.wire.anchor][0][at]
        if t.into is None and t.verb != "send":
            f.inputs[rank] = given
            f.released[rank] = view
        else:
            f.released[rank] = given

    def _moves(self) -> list[tuple[str, int, Flight]]:
        """What the network could do next."""
        moves = []
        for (_, rank), queue in list(self.queues.items()):
            if not queue or rank not in queue[0].released:
                continue
            f = queue[0]
            heads = all(
                self.queues[f.transfer.link, r][:1] == [f] for r in f.ranks if r not in f.landed
            )
            complete = len(f.released) == len(f.ranks) and heads
            if f.passed:
                if len(f.released) == len(f.ranks):
                    moves.append(("land", rank, f))
            elif rank not in f.inputs and f.result is None:
                moves.append(("take", rank, f))
            elif complete and len(f.inputs) == len(f.ranks):
                moves.append(("land", rank, f))
        return moves

    def _move(self, what: str, rank: int, f: Flight) -> None:
        t = f.transfer
        if what == "take":
            given = f.released[rank]
            f.inputs[rank] = np.empty(0) if given is None else given.copy()
            if given is not None and self._in_place(t) and self.rng.random() < 0.5:
                given[...] = np.nan
            return
        if not f.passed:
            if f.result is None:
                f.result = self._computed(f)
            if self._in_place(t):
                f.released[rank][...] = self._share(f, rank)
        f.landed.add(rank)
        self.queues[t.link, rank].remove(f)

    def _in_place(self, t: Transfer) -> bool:
        return t.verb != "send" and t.wire is None and t.into is None

    def _computed(self, f: Flight) -> Array:
        if f.transfer.wire is not None:
            return self._decoded(f)
        if f.transfer.verb == "send":
            return f.inputs[f.ranks[0]]
        if f.transfer.verb == "all_gather":
            pieces = [f.inputs[r][self._own(f, r)] for r in f.ranks]
            return np.concatenate(pieces)
        return sum(f.inputs[r] for r in f.ranks) / len(f.ranks)

    def _decoded(self, f: Flight) -> Array:
        t, wire = f.transfer, f.transfer.wire
        args, at = dict(wire.args), self._slice(t)
        ranks = f.ranks[:1] if t.verb == "send" else f.ranks
        given = [f.inputs[r] for r in ranks]
        if wire.error is not None:
            given = [
                x + self.store[r][wire.error][0][at] for x, r in zip(given, ranks, strict=True)
            ]
        if t.verb == "send" and wire.anchor is not None:
            given = [given[0] - self.store[ranks[0]][wire.anchor][0][at]]
        if wire.name == "topk" and way(wire.name, args) == "gather":
            arrived = [_largest(x, args["fraction"]) for x in given]
            mean, lost = (
                sum(arrived) / len(ranks),
                [x - y for x, y in zip(given, arrived, strict=True)],
            )
        else:
            used = codec(wire.name, args)
            kept = [self.kept[r].setdefault(t.id, {}) for r in ranks]
            memories = kept if wire.error is not None or used.linear else None
            mean, lost = used.average(given, way(wire.name, args), f.iteration, memories)
        if wire.error is not None:
            for r, own in zip(ranks, lost, strict=True):
                self.store[r][wire.error][0][at] = own
        if t.verb == "send" and wire.anchor is not None:
            self.store[ranks[0]][wire.anchor][0][at] += mean
        return mean

    def _share(self, f: Flight, rank: int) -> Array:
        assert f.result is not None
        if f.transfer.verb != "reduce_scatter":
            return f.result
        rubbish = np.full_like(f.result, np.nan)
        rubbish[self._own(f, rank)] = f.result[self._own(f, rank)]
        return rubbish

    def _own(self, f: Flight, rank: int) -> slice:
        size = len(f.inputs[f.ranks[0]])
        each, k = -(-size // len(f.ranks)), f.ranks.index(rank)
        return slice(min(k * each, size), min(k * each + each, size))

    def _wait(self, rank: int, f: Flight) -> Iterator[str]:
        t = f.transfer
        if t.when is not None and not self._yes(t, f.iteration):
            return
        while rank not in f.landed:
            yield "blocked"
        if self._in_place(t):
            return
        given, result = f.released.get(rank), self._share(f, rank)
        if t.verb == "send" and t.wire is not None and t.wire.anchor is not None:
            result = self.store[rank][t.into or t.payload.buffer][0][self._slice(t)] + result
        elif t.wire is not None and t.wire.anchor is not None:
            anchor = self.store[rank][t.wire.anchor][0]
            anchor[self._slice(t)] += result
            result = anchor[self._slice(t)]
        if t.into is None and t.verb != "send":
            assert given is not None
            given[...] = result
        else:
            place = self.store[rank][t.into or t.payload.buffer][0]
            place[self._slice(t)] = result

    # ---- arithmetic -------------------------------------------------------------------------

    def _span(self, buckets: range) -> slice:
        return slice(self.problem.offsets[buckets.start], self.problem.offsets[buckets.stop])

    def _slice(self, t: Transfer) -> slice:
        whole, p = self._span(t.payload.buckets), t.payload
        size = whole.stop - whole.start
        return slice(
            whole.start + size * p.part // p.parts,
            whole.start + size * (p.part + p.width) // p.parts,
        )

    def _say(self, rank: int, v: Vote, i: int) -> bool:
        run = v.buckets or range(self.plan.buckets)
        measured = [self.measured.get((rank, b)) for b in run]
        norm = self._norm(rank, run) if None in measured else sum(measured)
        last = self.norms.get((rank, v.name))
        if norm:
            self.norms[rank, v.name] = norm
        if self.say is not None:
            return self.say(v.name, i, rank)
        if last is None or norm == 0:
            return True
        return not abs(norm - last) / last < v.arg("threshold")

    def _norm(self, rank: int, run: range) -> float:
        return float((self.store[rank]["grad"][0][self._span(run)] ** 2).sum())

    def _apply(self, rank: int, a: Apply, buckets: range) -> None:  # noqa: C901
        s, at, args = self.store[rank], self._span(buckets), dict(a.args)
        if a.rule == "close":
            s["grad"].insert(0, s["grad"].pop())
            self.added[rank].insert(0, self.added[rank].pop())
        elif a.rule == "local":
            self._local(rank, at, args)
        elif a.rule == "reset":
            s["state"][0][at] = 0
        elif a.rule == "add":
            s[args["target"]][0][at] += s[args["source"]][0][at]
        elif a.rule == "copy":
            s[args["target"]][0][at] = s[args["source"]][0][at]
        elif a.rule == "clear":
            s[args["buffer"]][0][at] = 0
        elif a.rule == "measure":
            for b in buckets:
                self.measured[rank, b] = self._norm(rank, range(b, b + 1))
        elif a.rule == "scale":
            s[args["buffer"]][0][at] *= args["by"][rank]
        elif a.rule == "swap":
            one, other = s[args["a"]][0], s[args["b"]][0]
            one[at], other[at] = other[at].copy(), one[at].copy()
        elif a.rule == "clip":
            length = self._norm(rank, buckets) ** 0.5
            assert args["buffer"] == "grad"
            s["grad"][0][at] *= min(1.0, args["norm"] / (length + 1e-6))
        elif a.rule == "clip_early":
            assert args["buffer"] == "grad"
            if buckets.start == 0:
                self.early[rank] = [self.early[rank][1], 0.0]
            self.early[rank][1] += self._norm(rank, buckets)
            last, so_far = self.early[rank]
            length = (last if last < np.inf else so_far) ** 0.5
            s["grad"][0][at] *= min(1.0, args["norm"] / (length + 1e-6))
        elif a.rule == "select":
            done = self.rounds[rank, args["buffer"]]
            self.rounds[rank, args["buffer"]] += 1
            counts = draw_samples(args["samples"], args["fraction"], args["seed"], done)
            s[args["buffer"]][0][at] *= len(counts) * counts[rank] / sum(counts)
        elif a.rule == "delta":
            mean = s[args.get("average", "average")][0][at]
            s["param"][0][at] += mean - s[args.get("snapshot", "snapshot")][0][at]
        elif a.rule == "outer":
            self._outer(s, at, args)
        elif a.rule == "blend":
            share, common = args.get("share", 0.5), s[args.get("source", "average")][0]
            s["param"][0][at] = share * s["param"][0][at] + (1 - share) * common[at]
        else:
            raise AssertionError(a.rule)

    def _local(self, rank: int, at: slice, args: dict) -> None:
        s, age = self.store[rank], args.get("age", 0)
        gradient, added = s["grad"][age][at], self.added[rank][age][at]
        if not added.any():
            return
        factor = args.get("scale", 1.0)
        if args.get("merge") == "mean":
            factor = factor / np.maximum(added, 1)
        s["state"][0][at] = MOMENTUM * s["state"][0][at] + factor * gradient
        s["param"][0][at] -= RATE * s["state"][0][at]
        gradient[...] = added[...] = 0

    def _outer(self, s: dict[str, list[Array]], at: slice, args: dict) -> None:
        rate, momentum = args.get("rate", 0.7), args.get("momentum", 0.9)
        anchor, velocity = s["anchor"][0], s["velocity"][0]
        average = s[args.get("buffer", "param")][0]
        change = anchor[at] - average[at]
        velocity[at] = momentum * velocity[at] + change
        ahead = change + momentum * velocity[at] if args.get("nesterov", 1) else velocity[at]
        anchor[at] -= rate * ahead
        average[at] = anchor[at]


def momentum(worker, buckets, weights, gradients) -> None:
    """The same optimizer for the interpreter, its state in the buffer of that name."""
    state = worker.buffers["state"][0][worker.span(buckets)]
    state *= MOMENTUM
    state += gradients
    weights -= RATE * state


def _deadline(rule: Transfer | Apply | Vote) -> Moment:
    if isinstance(rule, Transfer):
        return rule.before
    return rule.at if isinstance(rule, Apply) else rule.due


def _largest(array: Array, fraction: float) -> Array:
    count = max(1, int(len(array) * fraction)) if len(array) else 0
    kept = np.zeros_like(array)
    for place in sorted(range(len(array)), key=lambda p: (abs(array[p]), p))[len(array) - count :]:
        kept[place] = array[place]
    return kept
