"""Priority schedules: in which order the slices of one backward take a link.

Time 0 is the start of backward. Each bucket of the next forward, input side (the last bucket)
first, waits only for its own slices; the link carries one slice at a time, in a given order.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from offbeat.strategies.solvers import inputs as _check


class Slice(NamedTuple):
    """A message: released by the gradient of `bucket`, due by its next forward.

    `seconds` alone on the link; `size_bytes` is what it takes of the credit in flight.
    """

    bucket: int
    seconds: float
    size_bytes: int = 1


@dataclass(frozen=True)
class Compute:
    """What one iteration computes, in seconds, per bucket in backward order.

    `ready_s` (non-decreasing): when its gradient exists; `forward_s`: its forward with the update
    before it; `other_s`: what comes between backward and forward. Raises ValueError.
    """

    ready_s: Sequence[float]
    forward_s: Sequence[float]
    other_s: float = 0.0

    def __post_init__(self) -> None:
        ready, forward = _check.ready(self.ready_s), _check.numbers("forward_s", self.forward_s)
        _check.same_length("forward_s", forward, "ready_s", ready)
        _check.number("other_s", self.other_s)


def iteration_s(order: Sequence[Slice], compute: Compute) -> float:
    """Seconds from the start of backward to the end of the next forward; O(slices + buckets).

    The link serves `order` strictly: a slice that is not ready holds up those behind it. This is
    the steady state, as every slice has landed when the last bucket's forward begins.
    """
    ready = np.asarray(compute.ready_s, dtype=np.float64)
    bucket = np.fromiter((s.bucket for s in order), dtype=np.intp, count=len(order))
    seconds = np.fromiter((s.seconds for s in order), dtype=np.float64, count=len(order))
    landed = np.full(len(ready), (ready[-1] if len(ready) else 0.0) + compute.other_s)
    np.maximum.at(landed, bucket, _chain(ready[bucket], seconds))
    forward = np.asarray(compute.forward_s, dtype=np.float64)[::-1]
    return float(_chain(landed[::-1], forward)[-1]) if len(ready) else compute.other_s


def priority_order(
    slices: Sequence[Slice], ready_s: Sequence[float], credit_bytes: int
) -> list[int]:
    """Indices of `slices` in the order in which a priority queue commits them to the link.

    Of the slices that are ready, those of the input side come first, then by index. They are
    committed while less than `credit_bytes` is in flight, and never revoked; 1 means one at a
    time. O(n log n). Raises ValueError. Source: ByteScheduler; P3 is one at a
    time.
    """
    ready = _check.ready(ready_s)
    if credit_bytes < 1:
        raise ValueError(f"credit_bytes ({credit_bytes}) must be at least 1; use 1 for one slice")
    unreleased = deque(sorted(range(len(slices)), key=lambda i: slices[i].bucket))
    waiting: list[tuple[int, int]] = []
    flight: deque[tuple[float, int]] = deque()  # (end, bytes)
    order: list[int] = []
    now_s = free_s = 0.0
    in_flight_bytes = 0
    while len(order) < len(slices):
        while unreleased and ready[slices[unreleased[0]].bucket] <= now_s:
            i = unreleased.popleft()
            heappush(waiting, (-slices[i].bucket, i))
        while flight and flight[0][0] <= now_s:
            in_flight_bytes -= flight.popleft()[1]
        if waiting and in_flight_bytes < credit_bytes:
            _, i = heappop(waiting)
            free_s = max(now_s, free_s) + slices[i].seconds
            flight.append((free_s, slices[i].size_bytes))
            in_flight_bytes += slices[i].size_bytes
            order.append(i)
            continue
        next_ready_s = float(ready[slices[unreleased[0]].bucket]) if unreleased else math.inf
        now_s = min(next_ready_s, flight[0][0] if flight else math.inf)
    return order


def _chain(earliest_s: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Ends of jobs done one after the other, none before its earliest start."""
    total_s = np.cumsum(seconds)
    return np.maximum.accumulate(earliest_s - (total_s - seconds)) + total_s
