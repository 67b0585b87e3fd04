"""Greedy assignment of buckets to the sets of a period, by least growth of the cost."""

from bisect import bisect_left
from collections.abc import Sequence

# Growths that differ by less than this share of the latest finish are equal up to rounding.
_ROUNDING = 1e-12


def balance(
    order: Sequence[int], ready_s: Sequence[float], communication_s: Sequence[float], period: int
) -> tuple[tuple[int, ...], ...]:
    """Assign buckets to sets one after the other, each to the set whose cost grows least.

    The cost of a set is the time until both backward and the set's messages end. Ties are broken by
    the earliest finish, then by the first set.

    Args:
        order: buckets in the order of assignment.
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        communication_s: seconds of each bucket's message.
        period: number of sets.

    Returns:
        Ascending buckets of each set.
    """
    sets = [_OpenSet(h, ready_s, communication_s) for h in range(period)]
    by_finish, finishes = sets.copy(), [(s.finish_s, s.index) for s in sets]
    for i in order:
        rounding_s = _ROUNDING * (by_finish[-1].finish_s + communication_s[i])
        chosen = _least_growth(by_finish, i, ready_s[i], communication_s[i], rounding_s)
        before_s = chosen.finish_s
        chosen.add(i)
        if chosen.finish_s > before_s:
            at = bisect_left(finishes, (before_s, chosen.index))
            del by_finish[at], finishes[at]
            finish = chosen.finish_s, chosen.index
            at = bisect_left(finishes, finish)
            by_finish.insert(at, chosen)
            finishes.insert(at, finish)
    return tuple(tuple(-place for place in reversed(s.places)) for s in sets)


class _OpenSet:
    """Mutable set of buckets, stored from the input side to the output side.

    Attributes:
        cost_s: end of backward and of the set's messages.
        finish_s: end of the set's last message.
        finishes_s: `finish_s` of the first n stored buckets, `[n]`.
        first: bucket nearest to the output.
        first_s: ready time of `first`.
        index: index of the set.
        places: buckets as negative numbers, so that they ascend.
        sent_s: sum of the message seconds of the first n stored buckets, `[n]`.
        sum_s: sum of the message seconds of all buckets.
    """

    __slots__ = (
        "_comm_s",
        "_ready_s",
        "cost_s",
        "finish_s",
        "finishes_s",
        "first",
        "first_s",
        "index",
        "places",
        "sent_s",
        "sum_s",
    )

    def __init__(self, index: int, ready_s: Sequence[float], comm_s: Sequence[float]) -> None:
        self._ready_s, self._comm_s = ready_s, comm_s
        self.index = index
        self.places: list[int] = []
        self.sent_s = [0.0]
        self.finishes_s = [0.0]
        self.sum_s = self.finish_s = 0.0
        self.cost_s = ready_s[-1]
        self.first, self.first_s = len(ready_s), ready_s[-1]

    def finish_with(self, i: int) -> float:
        """Return the end of the last message if bucket i is added."""
        places, sent_s, ready_s = self.places, self.sent_s, self._ready_s
        at = bisect_left(places, -i)
        latest_s = ready_s[i] + sent_s[at]
        for n in range(at, len(places)):
            finish_s = ready_s[-places[n]] + sent_s[n + 1]
            if finish_s > latest_s:
                latest_s = finish_s
        latest_s += self._comm_s[i]
        before_s = self.finishes_s[at]
        return before_s if before_s > latest_s else latest_s

    def add(self, i: int) -> None:
        """Add bucket i to the set."""
        if self.first > i:
            self._append(-i)
            self.first, self.first_s = i, self._ready_s[i]
            return
        at = bisect_left(self.places, -i)
        later = self.places[at:]
        del self.places[at:], self.sent_s[at + 1 :], self.finishes_s[at + 1 :]
        self.sum_s, self.finish_s = self.sent_s[at], self.finishes_s[at]
        self._append(-i)
        for place in later:
            self._append(place)

    def _append(self, place: int) -> None:
        self.sum_s = sum_s = self.sum_s + self._comm_s[-place]
        finish_s = self._ready_s[-place] + sum_s
        if finish_s > self.finish_s:
            self.finish_s = finish_s
            if finish_s > self.cost_s:
                self.cost_s = finish_s
        self.places.append(place)
        self.sent_s.append(sum_s)
        self.finishes_s.append(self.finish_s)


def _least_growth(
    by_finish: Sequence[_OpenSet], i: int, ready_s: float, own_s: float, rounding_s: float
) -> _OpenSet:
    """Return the set whose cost grows least with bucket i.

    `by_finish` is sorted by finish. After a set whose cost does not grow, sets with a later finish
    are not tried.
    """
    alone_s = ready_s + own_s
    growth_s = best_s = float("inf")
    best = by_finish[0]
    for open_set in by_finish:
        finish_s = open_set.finish_s
        if finish_s > best_s and growth_s <= 0.0:
            break
        late_s = alone_s + open_set.sum_s
        if late_s > finish_s:  # otherwise the other messages end later, at any place of bucket i
            if open_set.first > i:
                finish_s = late_s
            elif (
                own_s + open_set.sum_s + open_set.first_s - open_set.cost_s > growth_s + rounding_s
            ):
                continue
            else:
                finish_s = open_set.finish_with(i)
        grown_s = finish_s - open_set.cost_s
        if grown_s < 0.0:
            grown_s = 0.0
        if grown_s > growth_s + rounding_s:
            continue
        earlier = finish_s < best_s or (finish_s == best_s and open_set.index < best.index)
        if earlier or grown_s < growth_s - rounding_s:
            best_s, best = finish_s, open_set
            if grown_s < growth_s:
                growth_s = grown_s
    return best
