"""Balancing: buckets one after the other, each to the set whose cost grows least."""

from bisect import bisect_left
from collections.abc import Sequence

# Two growths that differ by less than this share of the latest finish are rounding apart.
_ROUNDING = 1e-12


def balance(
    order: Sequence[int], ready_s: Sequence[float], communication_s: Sequence[float], period: int
) -> tuple[tuple[int, ...], ...]:
    """Sets of buckets, ascending, when the buckets are placed in this order.

    A set costs the time until backward and its messages are over. Each bucket goes to the set
    whose cost grows least; ties: the earliest finish, then the first set.
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
    """One set while it grows.

    Its buckets are kept from the input side on: in this order the messages of a bucket and of all
    before it take `sent_s`, and end that long after the bucket is ready, or later.
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
        self.places: list[int] = []  # its buckets, negative so that they ascend
        self.sent_s = [0.0]  # by number of buckets from the input side on: their messages' time,
        self.finishes_s = [0.0]  # and the finish if only these had to be waited for
        self.sum_s = self.finish_s = 0.0  # the last of both
        self.cost_s = ready_s[-1]
        self.first, self.first_s = len(ready_s), ready_s[-1]  # the bucket nearest the output

    def finish_with(self, i: int) -> float:
        """End of the last message if bucket i joined."""
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
        """Put bucket i into the set."""
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
    """The set whose cost grows least with bucket i. Sets come by their finish: once one does not
    grow, those that finish later without the bucket need not be tried."""
    alone_s = ready_s + own_s
    growth_s = best_s = float("inf")
    best = by_finish[0]
    for open_set in by_finish:
        finish_s = open_set.finish_s
        if finish_s > best_s and growth_s <= 0.0:
            break
        late_s = alone_s + open_set.sum_s
        if late_s > finish_s:  # else it is hidden by the other messages, wherever it comes
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
