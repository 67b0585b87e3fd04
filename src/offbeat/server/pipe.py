"""One direction of a server's link, shared by simultaneous flows, in virtual time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float64]


class Pipe:
    """Flows of bytes, at most one per worker, with max-min fair rates.

    A flow is limited by its worker's entry in `caps`, their sum by `capacity` (bytes/s).
    """

    def __init__(self, caps: Rates, capacity: float):
        self._caps, self._capacity = caps, capacity
        self._left = np.zeros(len(caps))
        self._active = np.zeros(len(caps), dtype=bool)
        self._rates = np.zeros(len(caps))
        self._now_s = 0.0
        self.busy_s = 0.0

    def start(self, worker: int, size_bytes: float, now_s: float) -> None:
        """Start a flow of `size_bytes` for a worker without a flow."""
        self._advance(now_s)
        self._left[worker], self._active[worker] = size_bytes, True
        self._share()

    def end(self, worker: int, now_s: float) -> None:
        """End a worker's flow at the time that `next_end` has returned."""
        self._advance(now_s)
        self._active[worker] = False
        self._share()

    def next_end(self) -> tuple[float, int]:
        """Return the end of the next flow in seconds and its worker; (inf, -1) without flows."""
        if not self._active.any():
            return math.inf, -1
        left_s = np.where(self._active, self._left / np.maximum(self._rates, 1e-300), math.inf)
        worker = int(left_s.argmin())
        return self._now_s + max(float(left_s[worker]), 0.0), worker

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if self._active.any():
            self._left -= self._rates * elapsed_s
            self.busy_s += elapsed_s

    def _share(self) -> None:
        self._rates = np.where(
            self._active, fair_shares(self._caps, self._active, self._capacity), 0
        )


def fair_shares(caps: Rates, active: NDArray[np.bool_], capacity: float) -> Rates:
    """Max-min fair rates of the active flows, none above its cap."""
    rates = np.zeros(len(caps))
    order = np.flatnonzero(active)
    order = order[np.argsort(caps[order], kind="stable")]
    left = capacity
    if len(order) and caps[order[0]] * len(order) >= capacity:  # no cap is below the even share
        rates[order] = capacity / len(order)
        return rates
    for position, worker in enumerate(order):
        rates[worker] = min(caps[worker], left / (len(order) - position))
        left -= rates[worker]
    return rates
