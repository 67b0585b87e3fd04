"""Slow, readable twins of the solvers: enumeration and event-by-event simulation."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product

Times = Sequence[float]
MessageSeconds = Callable[[range], float]


# One link, first in, first out


def fifo_end(messages: Sequence[tuple[float, float]]) -> float:
    """End of the last of (release, duration) messages on one link, event by event."""
    events = [(release_s, k, "release") for k, (release_s, _) in enumerate(messages)]
    heapq.heapify(events)
    queue: list[int] = []
    busy, now_s = False, 0.0
    while events:
        now_s, k, kind = heapq.heappop(events)
        if kind == "release":
            queue.append(k)
        else:
            busy = False
        if queue and not busy:
            sent = queue.pop(0)
            heapq.heappush(events, (now_s + messages[sent][1], sent, "sent"))
            busy = True
    return now_s


def set_finish(members: Sequence[int], ready_s: Times, communication_s: Times) -> float:
    return fifo_end([(ready_s[i], communication_s[i]) for i in members])


def fusion_end(groups: Sequence[range], ready_s: Times, message_s: MessageSeconds) -> float:
    return fifo_end([(ready_s[g[-1]], message_s(g)) for g in groups])


# Layer sets


def sets_cost(sets: Sequence[Sequence[int]], backward_s: Times, communication_s: Times) -> float:
    ready_s = list(accumulate(backward_s))
    total_s = 0.0
    for members in sets:
        backward_end_s = ready_s[-1] if ready_s else 0.0
        total_s += max(backward_end_s, set_finish(members, ready_s, communication_s))
    return total_s


def contiguous_splits(count: int, period: int) -> Iterator[list[list[int]]]:
    """Every way to cut the buckets into `period` intervals, some of them empty."""

    def cut(start: int, sets_left: int) -> Iterator[list[list[int]]]:
        if sets_left == 1:
            yield [list(range(start, count))]
            return
        for end in range(start, count + 1):
            for rest in cut(end, sets_left - 1):
                yield [list(range(start, end)), *rest]

    return cut(0, period)


def best_contiguous_cost(backward_s: Times, communication_s: Times, period: int) -> float:
    known: dict[tuple[int, ...], float] = {}

    def cost(members: list[int]) -> float:
        key = tuple(members)
        if key not in known:
            known[key] = sets_cost([members], backward_s, communication_s)
        return known[key]

    return min(sum(map(cost, sets)) for sets in contiguous_splits(len(backward_s), period))


def best_contiguous_cost_dp(backward_s: Times, communication_s: Times, period: int) -> float:
    """The same by dynamic programming over all ends, for any interval cost: O(H L^2) costs."""
    ready_s = list(accumulate(backward_s))
    count, backward_end_s = len(ready_s), ready_s[-1]
    least_s = [0.0] + [float("inf")] * count
    for _ in range(period):
        following_s = [float("inf")] * (count + 1)
        for start in range(count + 1):
            finish_s = 0.0
            for end in range(start, count + 1):
                if end > start:
                    finish_s = max(ready_s[end - 1], finish_s) + communication_s[end - 1]
                total_s = least_s[start] + max(backward_end_s, finish_s)
                following_s[end] = min(following_s[end], total_s)
        least_s = following_s
    return least_s[count]


def best_assignment_cost(backward_s: Times, communication_s: Times, period: int) -> float:
    """The least cost over all H^L assignments: no sets, contiguous or not, are cheaper."""
    count = len(backward_s)
    return min(
        sets_cost(
            [[i for i in range(count) if owner[i] == h] for h in range(period)],
            backward_s,
            communication_s,
        )
        for owner in product(range(period), repeat=count)
    )


def balanced_sets(backward_s: Times, communication_s: Times, period: int) -> list[list[int]]:
    """Decreasing ready + communication, each to the set that grows least, then finishes first."""
    ready_s = list(accumulate(backward_s))
    sets: list[list[int]] = [[] for _ in range(period)]
    unavoidable_s = [r + c for r, c in zip(ready_s, communication_s, strict=True)]
    for i in sorted(range(len(ready_s)), key=lambda i: -unavoidable_s[i]):
        finish_s = [set_finish(sorted([*s, i]), ready_s, communication_s) for s in sets]
        before_s = [set_finish(s, ready_s, communication_s) for s in sets]
        growth_s = [
            max(after, ready_s[-1]) - max(before, ready_s[-1])
            for after, before in zip(finish_s, before_s, strict=True)
        ]
        least_s = min(growth_s) + 1e-12 * max(finish_s)
        tied = [h for h in range(period) if growth_s[h] <= least_s]
        chosen = min(tied, key=lambda h: finish_s[h])
        sets[chosen] = sorted([*sets[chosen], i])
    return sets


def free_prefix(members: Sequence[int], backward_s: Times, communication_s: Times) -> list[int]:
    """Bubble filling by trying every prefix, the longest first; nothing is added to nothing."""
    if not members:
        return []
    ready_s = list(accumulate(backward_s))
    limit_s = sets_cost([members], backward_s, communication_s)
    for end in range(len(ready_s), 0, -1):
        union = sorted({*range(end), *members})
        if set_finish(union, ready_s, communication_s) <= limit_s:
            return [i for i in range(end) if i not in members]
    return []


# Fusion


def fusions(count: int) -> Iterator[list[range]]:
    """All 2^(L-1) groupings of consecutive buckets."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            bounds = [0, *inner, count]
            yield [range(a, b) for a, b in pairwise(bounds)]


def best_fusion_end(ready_s: Times, message_s: MessageSeconds) -> float:
    return min(fusion_end(g, ready_s, message_s) for g in fusions(len(ready_s)))


def mg_wfbp(ready_s: Times, transfer_s: Times, latency_s: float) -> list[range]:
    """MG-WFBP's Algorithm 1 as published: all starts are recomputed after each merge."""
    count = len(ready_s)
    size_s = list(transfer_s)
    message_s = [latency_s + size for size in size_s]

    def starts() -> list[float]:
        start_s, free_s = [], 0.0
        for i in range(count):
            start_s.append(max(ready_s[i], free_s))
            free_s = start_s[i] + message_s[i]
        return start_s

    merged = [False] * count  # into the next bucket
    start_s = starts()
    for i in range(count - 1):
        if ready_s[i + 1] < start_s[i] + latency_s:
            merged[i], message_s[i] = True, 0.0
            size_s[i + 1] += size_s[i]
            message_s[i + 1] = latency_s + size_s[i + 1]
            start_s = starts()
    groups, first = [], 0
    for i in range(count):
        if not merged[i]:
            groups.append(range(first, i + 1))
            first = i + 1
    return groups
