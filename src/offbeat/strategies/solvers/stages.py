"""Partition of a model into contiguous stages with the least cost of the most expensive stage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut costs into non-empty runs so that the most expensive run costs least.

    The result is exact. O(stages * n * log n).

    Args:
        costs: cost of each bucket.
        stages: number of runs.

    Raises:
        ValueError: `stages` exceeds the number of costs, or a cost is negative.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"stages ({stages}) must be at least 1 and at most the number of buckets ({count}); "
            "train on fewer workers, or make buckets smaller (min_bucket_bytes)"
        )
    if not all(cost >= 0 for cost in costs):
        raise ValueError(f"costs ({min(costs)}) must not be negative")
    before = [0.0, *accumulate(costs)]
    worst = before  # cost of the most expensive run of the first n costs
    cuts: list[list[int]] = []
    for run in range(2, stages + 1):
        table = [0] * (count + 1)
        longer = list(worst)
        for n in range(run, count + 1):
            longer[n], table[n] = _last_cut(worst, before, run - 1, n)
        cuts.append(table)
        worst = longer
    ends = [count]
    for table in reversed(cuts):
        ends.append(table[ends[-1]])
    return tuple(range(a, z) for a, z in pairwise([0, *reversed(ends)]))


def _last_cut(
    worst: Sequence[float], before: Sequence[float], least: int, n: int
) -> tuple[float, int]:
    """Return the cost of the most expensive run of the first n costs, and the last run's start.

    The start is at least `least`. With a later start, the last run costs less and the runs before
    it cost more. So the optimum is next to the point where the two costs cross.
    """
    crossing = bisect_left(
        range(n), x=True, lo=least, hi=n - 1, key=lambda c: worst[c] >= before[n] - before[c]
    )
    sides = [c for c in (crossing - 1, crossing) if c >= least]
    return min((max(worst[c], before[n] - before[c]), c) for c in sides)
