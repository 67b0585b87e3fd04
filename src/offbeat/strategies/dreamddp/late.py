"""Averages that may arrive after their iteration: due at the next forward, or some iterations
later.

Extensions of the paper, shared by DreamDDP and DiLoCo.

- `forward`: an average is due when the forward of its bucket begins. The equations are those of the
  paper. The messages of an iteration need an order, because late ones are needed early.
- `delayed`: a snapshot is averaged while training continues, and is applied some iterations later
  as `w += mean(snapshot) - snapshot`. Nearly everything is hidden, so few large messages are best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, chain, islice, pairwise, zip_longest
from typing import Any

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Buffer, Fact, Moment, Payload, Phases, Plan, local, transfer
from offbeat.core.profile import Profile
from offbeat.strategies.averaging import Average
from offbeat.strategies.dreamddp.sets import EXACT, Cycle
from offbeat.strategies.equations import StatePolicy
from offbeat.strategies.pieces import Piece, Sets, layer_set_facts, piece_times, whole_buckets

Times = Sequence[float]

ORDERS = 16  # largest number of orders that are tried for one set
ORDER_WORK = 4000  # the same in messages of these orders
EXCHANGE_WORK = 60_000  # largest number of messages in all sets that exchanges evaluate
ORDERING = 40  # time to order a set, relative to that of its cost


@dataclass(frozen=True)
class Planning:
    """What planners need to know: the strategy's name, the profile, and which averages it makes."""

    name: str
    profile: Profile
    period: int
    average: Average
    state: StatePolicy = "local"
    delay: int = 0
    gain: float = 1.0
    known: dict[str | int, Any] = field(default_factory=dict, compare=False, repr=False)
    """Times that are computed once."""

    @property
    def buckets(self) -> int:
        return len(self.profile.buckets)

    def seconds_of(self, pieces: Sequence[Piece]) -> list[float]:
        """Return the seconds of the messages of each piece."""
        tables = {n: self.bucket_s(n) for n in {piece.parts for piece in pieces}}
        return [
            tables[piece.parts][piece.buckets.start]
            if len(piece.buckets) == 1
            else piece.seconds(self.profile, self.state)
            for piece in pieces
        ]

    def bucket_s(self, parts: int = 1) -> list[float]:
        """Return the seconds of the messages of each bucket, or of one of `parts` equal slices."""
        if parts not in self.known:
            self.known[parts] = piece_times(self.profile, self.state, parts)
        return self.known[parts]


# ---- due at the next forward -----------------------------------------------------------------


def best_order(cycle: Cycle, members: Iterable[int]) -> tuple[int, ...]:
    """Return an order of these messages with a short cycle; with equal tails, backward order.

    Schrage's order is improved by Carlier's branching: a message that starts just before the urgent
    ones of a critical run is sent after all of them, or before all of them. Branches are tried in
    the order in which they appear, until `Cycle.cost` is reached or `ORDERS` are tried.

    Source: Carlier, The one-machine sequencing problem, 1982, without its bounds.
    """
    members = sorted(members)
    best = tuple(members)
    if cycle.is_flat or len(members) < 2:
        return best
    best_s, least_s = cycle.seconds(best), cycle.cost(members) * (1 + EXACT)
    branches: deque[tuple[Times, Times]] = deque([(cycle.ready, cycle.tail)])
    for left in reversed(range(min(ORDERS, max(2, ORDER_WORK // len(members))))):
        if not branches or best_s <= least_s:
            break
        ready, tail = branches.popleft()
        order = _urgent_first(members, ready, cycle.message, tail)
        if (seconds := cycle.seconds(order)) < best_s:
            best, best_s = order, seconds
        more = _branches(order, ready, cycle.message, tail)
        branches += islice(more, max(0, left - len(branches)))  # others are not tried
    return best


def exchanged(cycle: Cycle, sets: Sets) -> Sets:
    """Return orders of sets between which messages were exchanged while that saves time.

    The longest iterations are tried first, each with the shortest other ones first.

    Args:
        cycle: times of the messages.
        sets: messages of each iteration.
    """
    orders = [best_order(cycle, members) for members in sets]
    seconds = [cycle.seconds(order) for order in orders]
    least, left = cycle.bound(len(sets)) * len(sets) * (1 + EXACT), EXCHANGE_WORK

    def exchange(a: int, b: int) -> bool:
        nonlocal left
        limit = (seconds[a] + seconds[b]) * (1 - EXACT)
        for pair in _exchanges(orders[a], orders[b]):
            left -= sum(map(len, pair))
            if left < 0:
                return False
            if sum(map(cycle.cost, pair)) < limit:
                left -= ORDERING * sum(map(len, pair))
                found = [best_order(cycle, members) for members in pair]
                found_s = [cycle.seconds(order) for order in found]
                if sum(found_s) < limit:
                    orders[a], orders[b] = found
                    seconds[a], seconds[b] = found_s
                    return True
        return False

    def improve() -> bool:
        longest = sorted(range(len(sets)), key=lambda h: -seconds[h])
        pairs = [(a, b) for a in longest for b in reversed(longest) if a != b]
        return any(seconds[a] > cycle.least * (1 + EXACT) and exchange(a, b) for a, b in pairs)

    while left > 0 and sum(seconds) > least and improve():
        pass
    return tuple(orders)


def _exchanges(one: Iterable[int], other: Iterable[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield both sets after one message of the first moved, or was swapped for one of the other."""
    for i in one:
        for taken in ((), *((j,) for j in other)):
            yield sorted({*one, *taken} - {i}), sorted({*other, i} - {*taken})


def _urgent_first(
    members: Sequence[int], ready: Times, message: Times, tail: Times
) -> tuple[int, ...]:
    """Return Schrage's order of messages given in ascending order: of those that can start, the one
    with the largest tail."""
    coming = sorted(members, key=ready.__getitem__)[::-1]
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            i = coming.pop()
            heappush(waiting, (-tail[i], i))
        _, i = heappop(waiting)
        now += message[i]
        order.append(i)
    return tuple(order)


def _branches(
    order: tuple[int, ...], ready: Times, message: Times, tail: Times
) -> Iterator[tuple[Times, Times]]:
    """Yield ready times and tails under which the blocking message comes later, or earlier; none
    if the order is optimal."""
    now = end = 0.0
    start = first = last = 0
    for n, i in enumerate(order):  # the critical run has no gaps and determines the end
        if ready[i] > now:
            now, start = ready[i], n
        now += message[i]
        if now + tail[i] > end:
            end, first, last = now + tail[i], start, n
    urgent = tail[order[last]]
    at = next((n for n in range(last, first - 1, -1) if tail[order[n]] < urgent), None)
    if at is None:
        return
    blocking, run = order[at], order[at + 1 : last + 1]
    run_s = sum(message[i] for i in run)
    for times, bound in ((ready, min(ready[i] for i in run)), (tail, min(tail[i] for i in run))):
        changed = list(times)
        changed[blocking] = max(changed[blocking], bound + run_s)
        yield (changed, tail) if times is ready else (ready, changed)


def forward_bound_s(job: Planning, cycle: Cycle) -> float:
    """Return a lower bound on the seconds per iteration of all plans with `due="forward"`.

    It is `Cycle.bound` with one message for the buckets k, k + 1, ... and one optimizer call.
    """
    later = job.profile.messages_ending_s(job.profile.default_link.name, "param", 0, job.buckets)
    calls = sum(job.profile.slowest().bucket_step_s) - sum(job.profile.slowest().bucket_update_s)
    heads = zip(cycle.head, later.tolist(), strict=True)
    return max(cycle.least - calls, *(head - calls + s / job.period for head, s in heads))


# ---- delayed ---------------------------------------------------------------------------------


def delayed_bound_s(job: Planning) -> float:
    """Return `max(F + B, C / H)`, where the update is part of F + B: a long enough delay hides all
    messages behind all compute."""
    everything = Payload("param", range(job.buckets))
    message_s = job.profile.message_s(everything, job.profile.default_link.name)
    return max(job.profile.slowest().compute_s, message_s / job.period)


def delayed_sets(job: Planning) -> Iterator[tuple[list[Piece], Sets]]:
    """Yield pieces and sets to compare, first those with the fewest messages.

    They are 1, 2, 4, ... runs of neighbouring buckets, and whole buckets in sets of even load, in
    this order and with heavy and light iterations in turns.
    """
    most = min(job.period, job.buckets)
    for count in sorted({2**n for n in range(most.bit_length())} | {most}):
        pieces = runs(job, count)
        yield pieces, spread([(n,) for n in range(len(pieces))], job.period)
    pieces, sets = even_sets(job, job.period)
    yield pieces, sets
    message = job.seconds_of(pieces)
    heavy = sorted(sets, key=lambda members: -sum(message[i] for i in members))
    half = (len(sets) + 1) // 2
    turns = chain.from_iterable(zip_longest(heavy[:half], reversed(heavy[half:])))
    yield pieces, tuple(members for members in turns if members is not None)


def runs(job: Planning, count: int) -> list[Piece]:
    """Return at most `count` runs of neighbouring buckets with messages of about equal length."""
    sent = list(accumulate(job.bucket_s()))
    ends = {bisect_left(sent, sent[-1] * n / count) + 1 for n in range(1, count)} | {job.buckets}
    return [Piece(range(a, z)) for a, z in pairwise([0, *sorted(ends)]) if z <= job.buckets]


def even_sets(job: Planning, count: int) -> tuple[list[Piece], Sets]:
    """Return `count` sets of whole buckets with even loads, spread over the period: the longest
    messages first, each to the set with the smallest load."""
    message = job.bucket_s()
    grain = max(message) * 1e-9 or 1.0  # equal buckets differ by rounding errors
    loads, sets = [(0, h) for h in range(count)], [list[int]() for _ in range(count)]
    for i in sorted(range(job.buckets), key=lambda i: (-round(message[i] / grain), i)):
        load, h = heappop(loads)
        sets[h].append(i)
        heappush(loads, (load + round(message[i] / grain), h))
    return whole_buckets(job.buckets), spread([tuple(sorted(one)) for one in sets], job.period)


def spread(sets: Sequence[tuple[int, ...]], period: int) -> Sets:
    """Return the sets evenly spread over a longer period, with empty sets between them."""
    found: list[tuple[int, ...]] = [()] * period
    for n, members in enumerate(sets, 1):
        found[n * period // len(sets) - 1] = members
    return tuple(found)


def delayed_plan(
    job: Planning, pieces: Sequence[Piece], sets: Sets, *, in_backward: bool = False
) -> Plan:
    """Return the plan that applies averages at the forward after `job.delay` further iterations.

    Parameters are copied twice: after the step, or at their gradients with
    `average="before_update"`. One copy is averaged in place; the difference of both is added to the
    parameters. Deadlines leave room for one optimizer step of all buckets, so clipping works.

    Args:
        job: settings of the averages.
        pieces: runs of buckets that are one message.
        sets: pieces that each iteration of the period sends.
        in_backward: whether each bucket is updated at its gradient, so that messages leave in
            backward, with the same equations.
    """
    after = job.average == "after_update"
    early = in_backward and after
    point = "grad" if early or not after else "step"
    transfers = []
    applies = [local(job.buckets, Moment("grad" if early else "step"), range(job.period))]
    kept = (("kept", round(1 - job.gain, 12)),) if job.gain < 1 else ()
    for h, members in enumerate(sets):
        taken, applied = Phases((h,)), Phases(((h + job.delay) % job.period,))
        for piece in (pieces[i] for i in members):
            last = piece.buckets[-1]
            transfers.append(
                transfer(
                    "average",
                    piece.buckets,
                    after=Moment(point, last) if point == "grad" else Moment(point),
                    before=Moment("forward", last, job.delay + 1),
                    phases=taken,
                    link=job.profile.default_link.name,
                )
            )
            for target in ("snapshot", "average"):
                args = (("source", "param"), ("target", target))
                applies.append(Apply("copy", piece.buckets, Moment(point), taken, args=args))
            landing = Moment("forward", lag=1)
            applies.append(Apply("delta", piece.buckets, landing, applied, args=kept))
    copies = 2 * job.profile.payload_bytes("param", range(job.buckets))
    return Plan(
        job.name,
        job.buckets,
        tuple(transfers),
        tuple(applies),
        buffers=(Buffer("snapshot"), Buffer("average")),
        period=job.period,
        facts=(*layer_set_facts(sets, ((),) * job.period, pieces), *costs(copies, job.delay)),
    )


def with_idle_steps(plan: Plan) -> Plan:
    """Return the plan with one update at the step in iterations that send nothing in backward.

    The numbers are the same, because no message holds the parameters in such an iteration.
    """
    busy = {p for t in plan.transfers if t.after.point == "grad" for p in t.phases}
    applies = []
    for apply in plan.applies:
        phases = set(apply.phases)
        if effects.is_update(apply) and apply.at.point == "grad" and phases - busy:
            idle = replace(apply, at=Moment("step"), phases=Phases(phases - busy))
            applies += [replace(apply, phases=Phases(phases & busy)), idle]
        else:
            applies.append(apply)
    return replace(plan, applies=tuple(applies))


def costs(memory_bytes: int = 0, staleness: int = 0) -> tuple[Fact, ...]:
    """Return facts about the costs in memory and staleness, compared with `due="end"`."""
    return (
        Fact("memory_bytes", memory_bytes, "further buffers on every rank"),
        Fact("staleness", staleness, "iterations that train without an average that has begun"),
    )
