"""Sets of layers: which messages each iteration of a period sends, and what they cost.

Buckets, the paper's layers, are numbered in backward order: bucket 0 is at the output side, and its
gradient is ready first. All functions here use plain numbers. They know no plan and no profile.

**One cost for both deadlines.** A message i can start `ready[i]` seconds after its iteration
begins, and its deadline is `tail[i]` seconds before the iteration ends.

- `due="end"`, the paper: the deadline is the end of the iteration, so all tails are equal.
- `due="forward"`: the deadline is the next forward of the bucket. An iteration is counted from the
  forward of bucket 0 to its next forward, and the tail is the compute in between that needs the
  average. Buckets that are ready late are needed early.

In both cases ready times and tails grow with the bucket. So of the messages of a set from bucket i
on, none starts before `ready[i]`, and at least `tail[i]` follows the last one. With `head = ready +
tail`, a set S takes

    cost(S) = max(least, max over i in S of head[i] + sum of message[j] for j in S, j >= i).

With equal tails this is Eq. 7 of the paper in closed form. With growing tails it is a lower bound
for all orders (the preemptive optimum of one machine), and the order of `late.best_order` reaches
it or exceeds it slightly.

Source: Tang et al., DreamDDP, 2025, Section 3.3, Algorithm 2, and Section 3.4.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.pieces import Sets

EXACT = 1e-12  # costs that differ by less than this share are equal up to rounding


class Cycle:
    """One iteration of the slowest rank, as its messages see it.

    Args:
        ready: seconds from the start of the iteration to the release of each message,
            non-decreasing.
        message: seconds of each message.
        tail: seconds of compute from each message's deadline to the end of the iteration,
            non-decreasing.
        least: seconds of the iteration without messages.

    Attributes:
        head: `ready + tail`: seconds of an iteration around an empty message.
    """

    def __init__(
        self,
        ready: Sequence[float],
        message: Sequence[float],
        tail: Sequence[float],
        least: float,
    ) -> None:
        self.ready, self.message, self.tail = list(ready), list(message), list(tail)
        self.least = least
        self.head = [r + q for r, q in zip(self.ready, self.tail, strict=True)]

    def __len__(self) -> int:
        return len(self.message)

    @cached_property
    def is_flat(self) -> bool:
        """Whether all tails are equal: then sending in backward order is optimal."""
        return len(set(self.tail)) <= 1

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`head` and `message`."""
        return np.array(self.head), np.array(self.message)

    def cost(self, members: Iterable[int]) -> float:
        """Return the cost of a set: the seconds of its iteration in the best order, or slightly
        less with growing tails.

        Args:
            members: messages of the set, in ascending order.
        """
        at = np.fromiter(members, dtype=np.intp)
        head, message = self.arrays
        ends = head[at] + message[at][::-1].cumsum()[::-1]
        return max(self.least, float(ends.max(initial=0.0)))

    def seconds(self, order: Iterable[int]) -> float:
        """Return the seconds of the iteration that sends these messages in this order."""
        ready, message, tail = self.ready, self.message, self.tail
        now, end = 0.0, self.least
        for i in order:  # comparisons instead of `max`, which takes most of the time
            if ready[i] > now:
                now = ready[i]
            now += message[i]
            if now + tail[i] > end:
                end = now + tail[i]
        return end

    def bound(self, period: int) -> float:
        """Return a lower bound on the mean seconds of an iteration, for all sets, slices, orders.

        The messages from bucket i on take their sum over the period, in whatever sets they are.
        Slices without latency reach the bound if each iteration sends 1 / period of each message.
        """
        head, message = self.arrays
        later = message[::-1].cumsum()[::-1] / period
        return max(self.least, float((head + later).max(initial=0.0)))


# ---- Algorithm 2 ----------------------------------------------------------------------------


def algorithm_2(cycle: Cycle, period: int) -> Sets:
    """Return the best sets of neighbouring layers: Algorithm 2 of the paper, and its exact optimum.

    Line numbers are those of the paper. It counts layers down from L; here they count up from 0, in
    the same order of backward. Corrections: line 28 continues with the set that holds the layer
    (Psi_-, not Psi_+). Line 30 continues with set h + 1, not h - 1. The cost of a set is exact (Eq.
    7), not the additive form of Eq. 10. A sub-problem, sets h to H of the layers from l on,
    does not depend on the sets before it. So each is solved once, those of the last sets first.
    This makes O(H L) of the paper's O(2^min(L-H, H)).

    The search is exact: a set that leaves out a hidden layer gains nothing, and a second layer that
    overflows adds all of its message here and at most as much to the next set.

    Args:
        cycle: times of the messages.
        period: number of sets H.
    """
    layers, least, head, message = len(cycle), cycle.least, cycle.head, cycle.message

    @cache
    def hidden_run(first: int) -> tuple[int, float, float]:
        """Return the end of the longest hidden set from a layer on, which has at least one layer;
        its cost; and its cost with one more layer, `inf` if that must not be tried."""
        stop, end, longer = first, 0.0, np.inf
        while stop < layers:
            longer = max(end, head[stop]) + message[stop]
            if stop > first and longer > least:  # 17-19: at least one layer; 20-22: optimal hiding
                break
            stop, end = stop + 1, longer
        is_hidden_in_part = stop < layers and end <= least  # 25
        return stop, max(end, least), longer if is_hidden_in_part else np.inf

    starts = [{0}]  # layers at which set h may start, in the sub-problems that can occur
    for _ in range(period - 1):
        ends = {hidden_run(first)[0] for first in starts[-1] if first < layers}
        starts.append({end for stop in ends for end in (stop, min(stop + 1, layers))} | {layers})
    # best[first]: cost of sets h to H of the layers from `first` on, and the first layer of each
    best = {first: (cycle.cost(range(first, layers)), (first,)) for first in starts[-1]}  # 12-16
    for begins in reversed(starts[:-1]):  # 8: SolveSubProblem(l, h)
        after, best = best, {}
        for first in begins:
            if first == layers:  # 9-11: the other sets are empty
                best[first] = after[first][0] + least, (first, *after[first][1])
                continue
            stop, here, longer = hidden_run(first)
            best[first] = here + after[stop][0], (first, *after[stop][1])  # 23-24, 29-30
            if longer < np.inf:  # 26-28: the next layer overflows, so the set ends with it
                one_more = longer + after[stop + 1][0]
                if one_more < best[first][0]:
                    best[first] = one_more, (first, *after[stop + 1][1])
    return tuple(tuple(range(a, z)) for a, z in pairwise([*best[0][1], layers]))  # 1-2


# ---- sets of any layers (ours) --------------------------------------------------------------


def balanced(cycle: Cycle, period: int, given: Sets = ()) -> Sets:
    """Return sets of any layers: each layer goes to the set whose cost grows least.

    Layers are taken by decreasing `head + message`, the least iteration with the layer's message.
    Ties go to the set whose messages end first, then to the first set. Layers near the input side
    have little time left, so neighbours of theirs in one set cannot all hide; these sets share
    them.

    Args:
        cycle: times of the messages.
        period: number of sets.
        given: messages that the sets hold already.
    """
    head, message, least = cycle.head, cycle.message, cycle.least
    sets = [_OpenSet(n, cycle) for n in range(period)]
    for one, members in zip(sets, given, strict=False):
        for i in reversed(members):
            one.add(i)
    others = set(range(len(cycle))).difference(*given)
    grain = EXACT * max(least, sum(message)) or EXACT  # growths that differ by less are equal
    early_first = sorted(sets, key=_by_end)
    for i in sorted(others, key=lambda i: (-head[i] - message[i], i)):
        best, best_growth, best_end = early_first[0], np.inf, np.inf
        for one in early_first:
            if best_growth == 0.0 and one.end > best_end:
                break
            end = one.end_with(i)
            growth = end - max(one.end, least)
            growth = growth if growth > grain else 0.0
            if growth < best_growth - grain or (
                growth <= best_growth + grain and (end, one.number) < (best_end, best.number)
            ):
                best, best_growth, best_end = one, growth, end
        early_first.remove(best)
        best.add(i)
        insort(early_first, best, key=_by_end)
    return tuple(tuple(-m for m in reversed(one.members)) for one in sets)


class _OpenSet:
    """A set that grows. It keeps the sums that the cost of another layer needs.

    Attributes:
        members: layers as negative numbers, from the input side to the output side.
        number: index of the set.
        end: `max over i of head[i] + messages from i on`: the cost before it is compared with
            `least`.
    """

    def __init__(self, number: int, cycle: Cycle) -> None:
        self.number, self._head, self._message = number, cycle.head, cycle.message
        self.members: list[int] = []
        self._sent, self._ends = [0.0], [0.0]  # of the first n members
        self._own = list[float]()  # head of each member and the messages up to it
        self.end = 0.0

    def end_with(self, i: int) -> float:
        """Return `end` with layer i. Only members nearer to the output send after it is counted."""
        members, sent = self.members, self._sent
        if not members or members[-1] < -i:  # the usual case
            return max(self.end, self._head[i] + sent[-1] + self._message[i])
        at = bisect_left(members, -i)
        end = max(self._head[i] + sent[at], *self._own[at:])
        return max(self._ends[at], end + self._message[i])

    def add(self, i: int) -> None:
        """Add layer i."""
        at = bisect_left(self.members, -i)
        self.members.insert(at, -i)
        del self._sent[at + 1 :], self._ends[at + 1 :], self._own[at:]
        sent, end = self._sent[-1], self._ends[-1]
        for m in self.members[at:]:
            sent += self._message[-m]
            own = self._head[-m] + sent
            end = own if own > end else end
            self._sent.append(sent)
            self._own.append(own)
            self._ends.append(end)
        self.end = end


_by_end = attrgetter("end", "number")


def cheaper_sets(cycle: Cycle, period: int) -> Sets:
    """Return the cheaper sets of `algorithm_2` and `balanced`; if the costs are equal, the
    paper's."""
    costs = [
        (sum(map(cycle.cost, sets)), sets)
        for sets in (algorithm_2(cycle, period), balanced(cycle, period))
    ]
    return costs[costs[1][0] < costs[0][0] * (1 - EXACT)][1]


# ---- Section 3.4 ----------------------------------------------------------------------------


def fill(cycle: Cycle, sets: Sets) -> Sets:
    """Return the further layers that iterations can average in the same time (Section 3.4).

    They are the longest run from the output side that adds no cost (lines 3-5, Eq. 12 with the
    exact cost). An iteration without messages gets none: a message would make its end a barrier at
    which ranks of different speed wait for each other.

    Args:
        cycle: times of the messages.
        sets: messages of each iteration, in ascending order.
    """
    head, message = cycle.arrays
    sent = np.concatenate([[0.0], message.cumsum()])
    first = sent[1:] + np.maximum.accumulate(head - sent[:-1])  # end of the first n messages

    def more(members: tuple[int, ...]) -> tuple[int, ...]:
        own = np.zeros(len(cycle))
        own[list(members)] = message[list(members)]
        ends = first + own.sum() - own.cumsum()  # with those of the set that follow
        limit = cycle.cost(members) * (1 + EXACT)
        free = int((np.maximum.accumulate(ends) <= limit).sum())
        return tuple(sorted({*range(free)}.difference(members)))

    return tuple(more(members) if members else () for members in sets)
