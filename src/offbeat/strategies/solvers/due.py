"""Messages due at the next forward: in which iteration of a period each goes, and in which order.

All messages of an iteration have arrived when the forward of bucket 0 begins. So a period falls
into cycles, one per iteration, from one such moment to the next: bucket 0's forward, the backward,
the next forward up to bucket 0. No cycle changes another. Within one, a message of bucket i may go
once its gradient exists, and compute that takes `left_s` is still to come after its deadline. That
is one machine with heads and tails (1 | r_j, q_j | C_max), whose order Carlier's search finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, combinations, product
from typing import NamedTuple

Order = tuple[int, ...]  # messages of one iteration, in the order in which they are sent
Orders = tuple[Order, ...]  # per iteration of the period

ORDER_WORK = 3000  # one search for an order tries so many, over the squared number of messages
MOST_WORK = 400_000  # messages in all the sets that searches for sets look at: .5 s
ORDERING = 60  # finding the order of a set takes so many times longer than a glance at it
EXACT = 1e-12  # gains below this share of a cycle are rounding


@dataclass(frozen=True)
class Cycle:
    """One iteration, in seconds, from the moment when bucket 0's forward begins to the next.

    Per message (both non-decreasing): `ready_s`, when it may go; `left_s`, the compute between its
    deadline and the end of the cycle. `message_s`: how long it takes. `least_s`: the cycle without
    any message.
    """

    ready_s: Sequence[float]
    message_s: Sequence[float]
    left_s: Sequence[float]
    least_s: float
    _known: dict[Order, tuple[float, Order]] = field(default_factory=dict, repr=False)

    def seconds(self, order: Iterable[int]) -> float:
        """Of a cycle in which these messages go in this order."""
        now_s, end_s = 0.0, self.least_s
        for i in order:
            now_s = max(now_s, self.ready_s[i]) + self.message_s[i]
            end_s = max(end_s, now_s + self.left_s[i])
        return end_s

    def best(self, members: Iterable[int]) -> tuple[float, Order]:
        """Seconds of a cycle with these messages, and the order that takes them."""
        key = tuple(sorted(members))
        if key not in self._known:
            order = ordered(self, key)
            self._known[key] = self.seconds(order), order
        return self._known[key]


def bound_s(cycle: Cycle, period: int) -> float:
    """Lower bound on the mean seconds of a cycle, whatever the sets, slices and orders.

    Those messages of a cycle that are not before k in backward order, c seconds together, begin
    after `ready_s[k]`; after the last one of them at least `left_s[k]` follows, since both ascend.
    So no cycle is shorter than `ready_s[k] + c + left_s[k]`, nor than `least_s`. Over a period the
    c add up to all messages from k on. Slices without latency, 1 / period of each message in every
    cycle, reach the greatest of these bounds: it is the preemptive optimum of one machine.
    """
    found = cycle.least_s
    later_s = 0.0
    for ready_s, message_s, left_s in reversed(
        [*zip(cycle.ready_s, cycle.message_s, cycle.left_s, strict=True)]
    ):
        later_s += message_s
        found = max(found, ready_s + later_s / period + left_s)
    return found


# ---- the order of one set -------------------------------------------------------------------


class _Job(NamedTuple):
    ready_s: float
    left_s: float


def ordered(cycle: Cycle, members: Sequence[int]) -> Order:
    """The order in which these messages end earliest, exactly unless the search gets too long.

    Branch and bound over the message that delays a critical run of others: it goes before all of
    them or after. Source: Carlier, The one-machine sequencing problem, 1982.
    """
    if len(members) < 2:
        return tuple(members)
    jobs = {i: _Job(cycle.ready_s[i], cycle.left_s[i]) for i in members}
    floor_s = max(cycle.least_s, _preempted_s(jobs, cycle))
    best_s, best = float("inf"), tuple(members)
    pending = [(floor_s, jobs)]
    for _ in range(max(2, ORDER_WORK // len(members) ** 2)):
        if not pending or best_s <= floor_s * (1 + EXACT):
            break
        at_least_s, jobs = pending.pop()
        if at_least_s >= best_s * (1 - EXACT):
            continue
        order = _urgent_first(jobs, cycle)
        seconds = cycle.seconds(order)
        if seconds < best_s:
            best_s, best = seconds, order
        pending += [
            (max(at_least_s, bound), other)
            for other in _branches(order, jobs, cycle)
            if (bound := max(cycle.least_s, _preempted_s(other, cycle))) < best_s * (1 - EXACT)
        ]
    return best


def _urgent_first(jobs: dict[int, _Job], cycle: Cycle) -> Order:
    """Of the messages that may go, always the one with most compute behind it (Schrage)."""
    coming = sorted(jobs, key=lambda i: (jobs[i].ready_s, i))[::-1]
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now_s = 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, jobs[coming[-1]].ready_s)
        while coming and jobs[coming[-1]].ready_s <= now_s:
            i = coming.pop()
            heappush(waiting, (-jobs[i].left_s, i))
        _, i = heappop(waiting)
        now_s += cycle.message_s[i]
        order.append(i)
    return tuple(order)


def _preempted_s(jobs: dict[int, _Job], cycle: Cycle) -> float:
    """What no order beats: messages that may be interrupted (Jackson)."""
    coming = sorted(jobs, key=lambda i: jobs[i].ready_s)[::-1]
    waiting: list[tuple[float, int, float]] = []
    now_s = end_s = 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, jobs[coming[-1]].ready_s)
        while coming and jobs[coming[-1]].ready_s <= now_s:
            i = coming.pop()
            insort(waiting, (jobs[i].left_s, i, cycle.message_s[i]))
        left_s, i, rest_s = waiting.pop()
        until_s = jobs[coming[-1]].ready_s if coming else float("inf")
        if now_s + rest_s <= until_s:
            now_s += rest_s
            end_s = max(end_s, now_s + left_s)
        else:
            insort(waiting, (left_s, i, rest_s - (until_s - now_s)))
            now_s = until_s
    return end_s


def _branches(order: Order, jobs: dict[int, _Job], cycle: Cycle) -> Iterator[dict[int, _Job]]:
    """The two ways to do better than an order; none if it is the best of these jobs."""
    critical = _critical(order, jobs, cycle)
    last = critical[-1]
    odd = next(
        (n for n in reversed(range(len(critical))) if jobs[critical[n]].left_s < jobs[last].left_s),
        None,
    )
    if odd is None:
        return
    one, run = critical[odd], critical[odd + 1 :]
    run_s = sum(cycle.message_s[i] for i in run)
    first_s, least_s = min(jobs[i].ready_s for i in run), min(jobs[i].left_s for i in run)
    job = jobs[one]
    yield {**jobs, one: job._replace(ready_s=max(job.ready_s, first_s + run_s))}
    yield {**jobs, one: job._replace(left_s=max(job.left_s, least_s + run_s))}


def _critical(order: Order, jobs: dict[int, _Job], cycle: Cycle) -> Order:
    """The messages without a gap up to the one after which the cycle lasts longest."""
    now_s = end_s = 0.0
    start = first = last = 0
    for n, i in enumerate(order):
        if jobs[i].ready_s > now_s:
            now_s, start = jobs[i].ready_s, n
        now_s += cycle.message_s[i]
        if now_s + jobs[i].left_s > end_s:
            end_s, first, last = now_s + jobs[i].left_s, start, n
    return order[first : last + 1]


# ---- sets -----------------------------------------------------------------------------------


@dataclass
class Work:
    """Messages in sets that one or several searches may still look at."""

    left: int = MOST_WORK


def due_sets(
    cycle: Cycle,
    period: int,
    starts: Iterable[Sequence[Sequence[int]]] = (),
    work: Work | None = None,
) -> Orders:
    """Sets and orders of a period that takes little time; each message is in one set.

    The search begins with some `starts` and with sets that are filled greedily, and climbs from
    each, the shortest first: it moves or swaps messages, always those that shorten two cycles
    together. It ends where nothing helps, where the bound is reached, or when no `work` is left. In
    tests it finds what brute force finds.
    """
    work = work or Work()
    least_s = bound_s(cycle, period) * period

    def period_s(sets: Iterable[Iterable[int]]) -> float:
        return sum(cycle.best(members)[0] for members in sets)

    found: list[tuple[float, int, list[frozenset[int]]]] = []
    for n, start in enumerate((*starts, greedy(cycle, period))):
        sets = [frozenset(members) for members in start]
        found.append((period_s(sets), n, sets))
    best_s, _, best = min(found)
    for _, _, start in sorted(found):
        if best_s <= least_s * (1 + EXACT) or work.left <= 0:
            break
        climb = _Climb(cycle, start, work)
        seconds = period_s(climb.run(least_s))
        if seconds < best_s * (1 - EXACT):
            best_s, best = seconds, climb.sets
    return tuple(cycle.best(members)[1] for members in best)


def greedy(cycle: Cycle, period: int) -> Orders:
    """Messages by decreasing `ready + message + left` (what none can avoid), each to the set whose
    cycle grows least; ties: the one that has least to send, then the first."""
    sets = [_OpenSet(cycle) for _ in range(period)]
    grain_s = EXACT * cycle.least_s or EXACT  # growths that differ by less are equal up to rounding

    def alone_s(i: int) -> float:
        return cycle.ready_s[i] + cycle.message_s[i] + cycle.left_s[i]

    for i in sorted(range(len(cycle.ready_s)), key=lambda i: (-alone_s(i), -i)):
        longer_s = [one.seconds_with(i) for one in sets]
        growth = [round((s - one.seconds) / grain_s) for s, one in zip(longer_s, sets, strict=True)]
        h = min(range(period), key=lambda h: (growth[h], sets[h].load_s, h))
        sets[h].add(i, longer_s[h])
    return tuple(tuple(one.members) for one in sets)


class _OpenSet:
    """A set that grows, and what its cycle takes at least (see `bound_s`).

    A member i, of which the members before it in backward order take `before_s`, holds the cycle
    for `ready_s + left_s - before_s` more than all messages of the set take. `most_s` are the
    greatest of these differences up to each member, so no growth looks at every member.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self.members: list[int] = []
        self._before_s: list[float] = []  # what the members before each take,
        self._own_s: list[float] = []  # ready_s + left_s - before_s, and the greatest up to each
        self._most_s: list[float] = []
        self.seconds, self.load_s = cycle.least_s, 0.0

    def seconds_with(self, i: int) -> float:
        """What the cycle takes at least with message i."""
        cycle, at = self._cycle, bisect_left(self.members, i)
        message_s = cycle.message_s[i]
        own_s = cycle.ready_s[i] + cycle.left_s[i] - self._before(at)
        if at and self._most_s[at - 1] > own_s:
            own_s = self._most_s[at - 1]
        longer_s = own_s + self.load_s + message_s
        return longer_s if longer_s > self.seconds else self.seconds

    def add(self, i: int, seconds: float) -> None:
        """Put message i, with which the cycle takes at least `seconds`, into the set."""
        cycle, at = self._cycle, bisect_left(self.members, i)
        message_s, before_s = cycle.message_s[i], self._before(at)
        self.members.insert(at, i)
        own_s = cycle.ready_s[i] + cycle.left_s[i] - before_s
        self._before_s[at:] = [before_s, *(s + message_s for s in self._before_s[at:])]
        self._own_s[at:] = [own_s, *(s - message_s for s in self._own_s[at:])]
        # From the member before on, whose entry stays as it is.
        first = max(at - 1, 0)
        self._most_s[first:] = accumulate(chain(self._most_s[first:at], self._own_s[at:]), max)
        self.seconds, self.load_s = seconds, self.load_s + message_s

    def _before(self, at: int) -> float:
        return self._before_s[at] if at < len(self.members) else self.load_s


def _at_least_s(cycle: Cycle, members: Sequence[int]) -> float:
    """What a cycle with these messages, ascending, takes at least: see `bound_s`."""
    ready_s, message_s, left_s = cycle.ready_s, cycle.message_s, cycle.left_s
    found, later_s = cycle.least_s, 0.0
    for i in reversed(members):
        later_s += message_s[i]
        if (end_s := ready_s[i] + later_s + left_s[i]) > found:
            found = end_s
    return found


class _Climb:
    """Sets, and better ones nearby, while work is left."""

    def __init__(self, cycle: Cycle, sets: Sequence[frozenset[int]], work: Work) -> None:
        self._cycle, self.sets, self._work = cycle, list(sets), work
        self._seconds = [cycle.best(members)[0] for members in sets]

    def run(self, least_s: float) -> list[frozenset[int]]:
        """The sets where nothing nearby is better."""
        while sum(self._seconds) > least_s * (1 + EXACT) and self._improve():
            pass
        return self.sets

    def _improve(self) -> bool:
        """The first change that shortens two cycles together; the longest cycles first, with the
        shortest others."""
        longest = sorted(range(len(self.sets)), key=lambda h: (-self._seconds[h], h))
        for a in longest:
            if self._seconds[a] <= self._cycle.least_s * (1 + EXACT):
                break
            for b in reversed(longest):
                if a != b and self._between(a, b):
                    return True
                if self._work.left <= 0:
                    return False
        return False

    def _between(self, a: int, b: int) -> bool:
        """Whether an exchange between two sets has shortened their cycles."""
        limit_s = (self._seconds[a] + self._seconds[b]) * (1 - EXACT)
        for given, taken in _exchanges(self.sets[a], self.sets[b]):
            if self._work.left <= 0:
                break
            one = (self.sets[a] - given) | taken
            other = (self.sets[b] - taken) | given
            self._work.left -= len(one) + len(other)
            if sum(_at_least_s(self._cycle, sorted(members)) for members in (one, other)) < limit_s:
                self._work.left -= ORDERING * (len(one) + len(other))
                seconds = self._cycle.best(one)[0], self._cycle.best(other)[0]
                if sum(seconds) < limit_s:
                    self.sets[a], self.sets[b] = one, other
                    self._seconds[a], self._seconds[b] = seconds
                    return True
        return False


def _exchanges(
    one: frozenset[int], other: frozenset[int]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """What one set gives and takes: a message for none, for one, two for one, one for two."""
    mine, theirs = sorted(one), sorted(other)
    none: frozenset[int] = frozenset()
    yield from ((frozenset((i,)), none) for i in mine)
    yield from ((frozenset((i,)), frozenset((j,))) for i, j in product(mine, theirs))
    if len(mine) * len(theirs) <= 64:
        for i, pair in product(mine, combinations(theirs, 2)):
            yield frozenset((i,)), frozenset(pair)
        for pair, j in product(combinations(mine, 2), theirs):
            yield frozenset(pair), frozenset((j,))


def filled(cycle: Cycle, orders: Orders) -> Orders:
    """Per iteration the longest run of output-side messages that it can send once more in the same
    time; an iteration without a message stays without one, as any would make it a barrier."""
    return tuple(_fill(cycle, order) for order in orders)


def _fill(cycle: Cycle, order: Order) -> Order:
    if not order:
        return ()
    limit_s, own = cycle.seconds(order) * (1 + EXACT), set(order)
    others = [i for i in range(len(cycle.ready_s)) if i not in own]
    # A longer run never ends earlier.
    fits = bisect_right(
        range(1, len(others) + 1), limit_s, key=lambda n: cycle.best((*order, *others[:n]))[0]
    )
    return tuple(others[:fits])
