"""Activation memory over one iteration, of parallel workers and of workers in cyclic order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAME = 1e-12  # share of a period; times that differ by less are equal


@dataclass(frozen=True)
class Curve:
    """Periodic piecewise linear function: bytes kept over the time of one iteration.

    Attributes:
        at_s: times of the points in ascending order, from 0 to the period. Two points at one time
            are a jump.
        kept_bytes: bytes at each point.
    """

    at_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        ordered = all(a <= b for a, b in zip(self.at_s, self.at_s[1:], strict=False))
        if len(self.at_s) != len(self.kept_bytes) or not ordered:
            raise ValueError("at_s must be in order, with one number of kept_bytes at each")
        if not self.at_s or self.at_s[0] != 0 or not self.period_s > 0:
            raise ValueError("at_s must begin with 0 and end above it: an iteration takes time")

    @property
    def period_s(self) -> float:
        """Return the seconds of one iteration."""
        return self.at_s[-1]

    @property
    def peak_bytes(self) -> float:
        """Return the largest number of bytes at any time."""
        return max(self.kept_bytes)

    def limits(self, at_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the left and right limits, in bytes, at times from 0 to the period.

        The two limits differ at a jump.
        """
        period_s = self.period_s
        x = np.concatenate([np.add(self.at_s, shift) for shift in (-period_s, 0, period_s)])
        y, same_s = np.tile(self.kept_bytes, 3), SAME * period_s
        before = np.searchsorted(x, at_s - same_s, side="left")
        after = np.searchsorted(x, at_s + same_s, side="right")
        return _interpolate(x, y, before, at_s), _interpolate(x, y, after, at_s)


def cyclic_curve(one: Curve, workers: int) -> Curve:
    """Return the mean curve of workers in cyclic order.

    Each worker is 1/workers of an iteration behind the previous one, so the period of the mean is
    1/workers of an iteration.
    """
    if workers < 1:
        raise ValueError(f"workers ({workers}) must be at least 1")
    step_s = one.period_s / workers
    turns_s = np.array([*(t % step_s for t in one.at_s), 0.0, step_s], dtype=np.float64)
    at_s = np.unique(turns_s)
    shifted_s = at_s[:, None] + np.arange(workers, dtype=np.float64) * step_s
    before, after = (values.mean(axis=1) for values in one.limits(shifted_s))
    times_s = np.repeat(at_s, 2)[1:-1]
    kept = np.column_stack([before, after]).ravel()[1:-1]
    return Curve(tuple(times_s.tolist()), tuple(kept.tolist()))


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak activation memory per worker.

    Attributes:
        workers: number of workers.
        parallel_bytes: peak per worker if all workers compute at the same time.
        cyclic_bytes: peak of the mean over workers if they compute in cyclic order.
    """

    workers: int
    parallel_bytes: float
    cyclic_bytes: float

    @property
    def reduction(self) -> float:
        """Return the share of the parallel peak that the cyclic order saves."""
        return 1 - self.cyclic_bytes / self.parallel_bytes if self.parallel_bytes else 0.0


def memory(one: Curve, workers: int) -> Memory:
    """Return the peak memory per worker for workers with equal curves.

    The peaks are exact for the given curve.

    Source: Cyclic Data Parallelism, Fig. 4.
    """
    return Memory(workers, one.peak_bytes, cyclic_curve(one, workers).peak_bytes)


def _interpolate(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    end: NDArray[np.intp],
    at: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Interpolate at times `at` on the segments from point `end - 1` to point `end`."""
    share = (at - x[end - 1]) / (x[end] - x[end - 1])
    return y[end - 1] + (y[end] - y[end - 1]) * share.clip(0, 1)
