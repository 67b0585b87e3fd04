"""Orders in which the slices of one backward are sent over a link, for priority schedules.

Time 0 is the start of backward. The link carries one slice at a time, in a given order. The next
forward runs from the input side (the last bucket) to the output side, and each bucket waits only
for its own slices.
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
    """Message that is released by a bucket's gradient and is due at the bucket's next forward.

    Attributes:
        bucket: index of the bucket.
        seconds: seconds of the message on an idle link.
        size_bytes: bytes that the message counts against the credit in flight.
    """

    bucket: int
    seconds: float
    size_bytes: int = 1


@dataclass(frozen=True)
class Compute:
    """Compute times of one iteration, per bucket in backward order.

    Attributes:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        forward_s: seconds of each bucket's forward, with the update before it.
        other_s: seconds between backward and the next forward.

    Raises:
        ValueError: a value is invalid.
    """

    ready_s: Sequence[float]
    forward_s: Sequence[float]
    other_s: float = 0.0

    def __post_init__(self) -> None:
        ready, forward = _check.ready(self.ready_s), _check.numbers("forward_s", self.forward_s)
        _check.same_length("forward_s", forward, "ready_s", ready)
        _check.number("other_s", self.other_s)


def iteration_s(order: Sequence[Slice], compute: Compute) -> float:
    """Return the seconds from the start of backward to the end of the next forward.

    The link sends the slices strictly in `order`, so a slice that is not ready delays all later
    slices. The result is the steady state, because every slice has arrived when the forward of
    bucket 0 begins. O(slices + buckets).

    Args:
        order: slices in sending order.
        compute: compute times of the iteration.
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
    """Return the indices of `slices` in the order in which a priority queue sends them.

    Of the ready slices, the one nearest the input side is sent first, then the one with the lowest
    index. A slice that has been handed to the link is not revoked. O(n log n).

    Args:
        slices: slices to send.
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        credit_bytes: slices are handed to the link while fewer bytes are in flight; 1 for one slice
            at a time.

    Raises:
        ValueError: an argument is invalid.

    Source: ByteScheduler; P3 sends one slice at a time.
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
    """Return the ends of jobs that run one after the other, each not before its earliest start."""
    total_s = np.cumsum(seconds)
    return np.maximum.accumulate(earliest_s - (total_s - seconds)) + total_s
