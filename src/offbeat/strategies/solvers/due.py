"""Sets and orders of messages that are due at the next forward.

All messages of an iteration have arrived when the forward of bucket 0 begins. Hence a period
consists of independent cycles, one per iteration, from one such moment to the next: forward of
bucket 0, backward, and the next forward up to bucket 0. Within a cycle, a message of bucket i can
start at `ready_s`, when its gradient exists, and compute of `left_s` seconds follows its deadline.
Ordering the messages of a cycle is the one-machine problem with heads and tails
(1 | r_j, q_j | C_max), which Carlier's branch and bound solves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, combinations, product
from operator import itemgetter
from typing import NamedTuple

Order = tuple[int, ...]  # messages of one iteration in sending order
Orders = tuple[Order, ...]  # order of each iteration of the period

ORDER_WORK = 3000  # orders that one search tries, times the squared number of messages
MOST_WORK = 400_000  # largest number of messages in all sets that searches evaluate: about .5 s
ORDERING = 60  # time of a search for an order, relative to computing the bound of the set
EXACT = 1e-12  # gains below this share of a cycle are rounding errors


@dataclass(frozen=True)
class Cycle:
    """One iteration, from the start of bucket 0's forward to the next start of bucket 0's forward.

    Attributes:
        ready_s: earliest start of each message, non-decreasing.
        message_s: seconds of each message.
        left_s: seconds of compute from each message's deadline to the end of the cycle,
            non-decreasing.
        least_s: seconds of the cycle without messages.
    """

    ready_s: Sequence[float]
    message_s: Sequence[float]
    left_s: Sequence[float]
    least_s: float
    _known: dict[Order, tuple[float, Order]] = field(default_factory=dict, repr=False)

    def seconds(self, order: Iterable[int]) -> float:
        """Return the seconds of a cycle with these messages in this order."""
        now_s, end_s = 0.0, self.least_s
        for i in order:
            now_s = max(now_s, self.ready_s[i]) + self.message_s[i]
            end_s = max(end_s, now_s + self.left_s[i])
        return end_s

    def best(self, members: Iterable[int]) -> tuple[float, Order]:
        """Return the seconds of a cycle with these messages in their best order, and this order."""
        key = tuple(sorted(members))
        if key not in self._known:
            order = best_order(self, key)
            self._known[key] = self.seconds(order), order
        return self._known[key]


def bound_s(cycle: Cycle, period: int, members: Sequence[int] | None = None) -> float:
    """Return a lower bound on the mean seconds of a cycle, for any sets, slices and orders.

    The bound includes the messages `members` in ascending order, by default all. Let c be the
    seconds of those messages of a cycle that do not precede k in backward order. They start after
    `ready_s[k]`, and at least `left_s[k]` follows the last one, because both ascend. So a cycle
    takes at least `ready_s[k] + c + left_s[k]`, and at least `least_s`. The sum of c over the
    cycles of a period is the time of all messages from k on. The largest of these bounds is the
    preemptive optimum of one machine. Slices without latency reach it, if each cycle sends
    1 / period of each message.
    """
    ready_s, message_s, left_s = cycle.ready_s, cycle.message_s, cycle.left_s
    found, later_s = cycle.least_s, 0.0
    for i in reversed(range(len(ready_s)) if members is None else members):
        later_s += message_s[i]
        if (end_s := ready_s[i] + later_s / period + left_s[i]) > found:
            found = end_s
    return found


# ---- the order of one set -------------------------------------------------------------------


class _Job(NamedTuple):
    ready_s: float
    left_s: float


_READY = itemgetter(0)


def best_order(cycle: Cycle, members: Sequence[int]) -> Order:
    """Return the order of these messages with the shortest cycle.

    The order is optimal unless the search exceeds `ORDER_WORK`. Branch and bound: a message that
    delays a critical run of other messages is placed before all of them or after all of them.

    Source: Carlier, The one-machine sequencing problem, 1982.
    """
    if len(members) < 2:
        return tuple(members)
    jobs = {i: _Job(cycle.ready_s[i], cycle.left_s[i]) for i in members}
    floor_s = max(cycle.least_s, _job_bound_s(jobs, cycle))
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
            if (bound := max(cycle.least_s, _job_bound_s(other, cycle))) < best_s * (1 - EXACT)
        ]
    return best


def _urgent_first(jobs: dict[int, _Job], cycle: Cycle) -> Order:
    """Return Schrage's order: of the messages that can start, send the largest `left_s` first."""
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


def _job_bound_s(jobs: dict[int, _Job], cycle: Cycle) -> float:
    """Return a lower bound for all orders: the preemptive optimum (Jackson's schedule)."""
    message_s = cycle.message_s
    coming = sorted(((ready_s, left_s, i) for i, (ready_s, left_s) in jobs.items()), key=_READY)
    coming.append((float("inf"), 0.0, -1))
    waiting: list[tuple[float, int, float]] = []  # the largest `left_s` last
    now_s = end_s = 0.0
    position, last = 0, len(jobs)
    until_s = coming[0][0]
    while position < last or waiting:
        if not waiting and until_s > now_s:
            now_s = until_s
        while until_s <= now_s:
            _, left_s, i = coming[position]
            insort(waiting, (left_s, i, message_s[i]))
            position += 1
            until_s = coming[position][0]
        left_s, i, rest_s = waiting.pop()
        if now_s + rest_s <= until_s:
            now_s += rest_s
            if now_s + left_s > end_s:
                end_s = now_s + left_s
        else:
            insort(waiting, (left_s, i, rest_s - (until_s - now_s)))
            now_s = until_s
    return end_s


def _branches(order: Order, jobs: dict[int, _Job], cycle: Cycle) -> Iterator[dict[int, _Job]]:
    """Yield the two subproblems that may improve on an order; none if the order is optimal."""
    critical = _critical_run(order, jobs, cycle)
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


def _critical_run(order: Order, jobs: dict[int, _Job], cycle: Cycle) -> Order:
    """Return the messages that determine the end of the cycle: a run without gaps."""
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
    """Remaining work of one or several searches, in messages of evaluated sets."""

    left: int = MOST_WORK


def due_sets(
    cycle: Cycle,
    period: int,
    starts: Iterable[Sequence[Sequence[int]]] = (),
    work: Work | None = None,
) -> Orders:
    """Return sets and orders of a short period. Each message is in one set.

    Local search from `starts` and from `greedy`, the shortest period first. It moves or swaps
    messages between two sets if this shortens the sum of their cycles. It stops if no change helps,
    if the bound is reached, or if no work is left. In tests it finds the optimum of brute force.

    Args:
        cycle: times of the messages.
        period: number of sets.
        starts: further sets to start from.
        work: limit of the search; None for `MOST_WORK`.

    Returns:
        Order of each iteration of the period.
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
    """Assign messages to sets one after the other, each to the set whose cycle grows least.

    The messages are taken by decreasing `ready_s + message_s + left_s`, the least cycle with the
    message. Ties are broken by the least seconds to send, then by the first set.
    """
    sets = [_OpenSet(cycle) for _ in range(period)]
    grain_s = EXACT * cycle.least_s or EXACT  # growths that differ by less are equal up to rounding

    def message_bound_s(i: int) -> float:
        return cycle.ready_s[i] + cycle.message_s[i] + cycle.left_s[i]

    for i in sorted(range(len(cycle.ready_s)), key=lambda i: (-message_bound_s(i), -i)):
        longer_s = [one.seconds_with(i) for one in sets]
        growth = [round((s - one.seconds) / grain_s) for s, one in zip(longer_s, sets, strict=True)]
        h = min(range(period), key=lambda h: (growth[h], sets[h].load_s, h))
        sets[h].add(i, longer_s[h])
    return tuple(tuple(one.members) for one in sets)


class _OpenSet:
    """Mutable set of messages with the lower bound of its cycle (see `bound_s`).

    A member i bounds the cycle by `own_s + load_s`, where `own_s = ready_s + left_s - before_s`,
    `before_s` is the time of the members before it in backward order, and `load_s` the time of all
    members. `_most_s` holds the running maximum of `own_s`, so that an insertion needs only one
    entry of it.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self.members: list[int] = []
        self._before_s: list[float] = []  # seconds of the members before each member
        self._own_s: list[float] = []  # ready_s + left_s - before_s of each member
        self._most_s: list[float] = []  # running maximum of `_own_s`
        self.seconds, self.load_s = cycle.least_s, 0.0

    def seconds_with(self, i: int) -> float:
        """Return the lower bound of the cycle if message i is added."""
        cycle, at = self._cycle, bisect_left(self.members, i)
        message_s = cycle.message_s[i]
        own_s = cycle.ready_s[i] + cycle.left_s[i] - self._preceding_s(at)
        if at and self._most_s[at - 1] > own_s:
            own_s = self._most_s[at - 1]
        longer_s = own_s + self.load_s + message_s
        return longer_s if longer_s > self.seconds else self.seconds

    def add(self, i: int, seconds: float) -> None:
        """Add message i, which raises the lower bound of the cycle to `seconds`."""
        cycle, at = self._cycle, bisect_left(self.members, i)
        message_s, before_s = cycle.message_s[i], self._preceding_s(at)
        self.members.insert(at, i)
        own_s = cycle.ready_s[i] + cycle.left_s[i] - before_s
        self._before_s[at:] = [before_s, *(s + message_s for s in self._before_s[at:])]
        self._own_s[at:] = [own_s, *(s - message_s for s in self._own_s[at:])]
        # Start at the member before i, whose entry is unchanged.
        first = max(at - 1, 0)
        self._most_s[first:] = accumulate(chain(self._most_s[first:at], self._own_s[at:]), max)
        self.seconds, self.load_s = seconds, self.load_s + message_s

    def _preceding_s(self, at: int) -> float:
        return self._before_s[at] if at < len(self.members) else self.load_s


class _Climb:
    """Local search from given sets, limited by the remaining work."""

    def __init__(self, cycle: Cycle, sets: Sequence[frozenset[int]], work: Work) -> None:
        self._cycle, self.sets, self._work = cycle, list(sets), work
        self._seconds = [cycle.best(members)[0] for members in sets]

    def run(self, least_s: float) -> list[frozenset[int]]:
        """Improve the sets until no exchange helps or the period takes `least_s`; return them."""
        while sum(self._seconds) > least_s * (1 + EXACT) and self._improve():
            pass
        return self.sets

    def _improve(self) -> bool:
        """Apply the first exchange that shortens the sum of two cycles; return whether one does.

        The longest cycles are tried first, each with the shortest other cycles first.
        """
        longest = sorted(range(len(self.sets)), key=lambda h: (-self._seconds[h], h))
        for a in longest:
            if self._seconds[a] <= self._cycle.least_s * (1 + EXACT):
                break
            for b in reversed(longest):
                if a != b and self._exchange(a, b):
                    return True
                if self._work.left <= 0:
                    return False
        return False

    def _exchange(self, a: int, b: int) -> bool:
        """Apply the first exchange between sets a and b that shortens the sum of their cycles.

        Return whether there is one.
        """
        limit_s = (self._seconds[a] + self._seconds[b]) * (1 - EXACT)
        for given, taken in _exchanges(self.sets[a], self.sets[b]):
            if self._work.left <= 0:
                break
            one = (self.sets[a] - given) | taken
            other = (self.sets[b] - taken) | given
            self._work.left -= len(one) + len(other)
            if sum(bound_s(self._cycle, 1, sorted(some)) for some in (one, other)) < limit_s:
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
    """Yield (given, taken) of one set: one message for none, one for one, one for two, two for one.

    Pairs are tried only if the product of the sets' sizes is at most 64.
    """
    own, others = sorted(one), sorted(other)
    none: frozenset[int] = frozenset()
    yield from ((frozenset((i,)), none) for i in own)
    yield from ((frozenset((i,)), frozenset((j,))) for i, j in product(own, others))
    if len(own) * len(others) <= 64:
        for i, pair in product(own, combinations(others, 2)):
            yield frozenset((i,)), frozenset(pair)
        for pair, j in product(combinations(own, 2), others):
            yield frozenset(pair), frozenset((j,))


def refill(cycle: Cycle, orders: Orders) -> Orders:
    """Return for each iteration the output-side messages that it can send again in the same time.

    The result is the longest run of messages that takes no more time. An iteration without messages
    gets none, because a message would make it a barrier.
    """
    return tuple(_fill(cycle, order) for order in orders)


def _fill(cycle: Cycle, order: Order) -> Order:
    if not order:
        return ()
    limit_s, own = cycle.seconds(order) * (1 + EXACT), set(order)
    others = [i for i in range(len(cycle.ready_s)) if i not in own]
    # A longer run never ends earlier, so bisection applies.
    fits = bisect_right(
        range(1, len(others) + 1), limit_s, key=lambda n: cycle.best((*order, *others[:n]))[0]
    )
    return tuple(others[:fits])
