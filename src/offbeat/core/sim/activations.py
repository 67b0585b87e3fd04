"""Activation memory over one iteration: of one worker, and of workers that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile

SAME = 1e-12  # of a period: times that differ by less are the same


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a model: seconds of its forward and backward, bytes that it keeps from one to the
    other."""

    forward_s: float
    backward_s: float
    activation_bytes: float


@dataclass(frozen=True)
class Curve:
    """Bytes over one period, which repeats: straight lines between points at `at_s`, from 0 to the
    period. Two points at one time are a jump."""

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
        """Of one iteration."""
        return self.at_s[-1]

    @property
    def peak_bytes(self) -> float:
        """The most at any time."""
        return max(self.kept_bytes)

    def limits(self, at_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes just before and just after times from 0 to the period; they differ at a jump."""
        period_s = self.period_s
        x = np.concatenate([np.add(self.at_s, shift) for shift in (-period_s, 0, period_s)])
        y, same_s = np.tile(self.kept_bytes, 3), SAME * period_s
        before = np.searchsorted(x, at_s - same_s, side="left")
        after = np.searchsorted(x, at_s + same_s, side="right")
        return _between(x, y, before, at_s), _between(x, y, after, at_s)


def curve(stages: Sequence[Stage], rest_s: float = 0.0) -> Curve:
    """What one worker keeps, stages from the input: it rises evenly through the forward of each
    and falls evenly through its backward, in reverse order; nothing is kept in the `rest_s`."""
    back = [*reversed(stages)]
    lengths_s = [s.forward_s for s in stages] + [s.backward_s for s in back] + [rest_s]
    changes = [s.activation_bytes for s in stages] + [-s.activation_bytes for s in back] + [0]
    kept = [*accumulate(changes, initial=0.0)]
    kept[-2:] = 0.0, 0.0  # whatever rounding has left
    return Curve(tuple(accumulate(lengths_s, initial=0.0)), tuple(kept))


def curve_of(profile: Profile) -> Curve:
    """The same of a profile's buckets; the update and what the loop does else come last."""
    stages = [Stage(b.forward_s, b.backward_s, b.activation_bytes) for b in profile.buckets[::-1]]
    return curve(stages, profile.update_s + profile.other_s)


def cyclic(one: Curve, workers: int) -> Curve:
    """The mean over so many workers, each 1/workers of an iteration behind the one before; it
    repeats as often."""
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
    """The most that workers keep, per worker: all at the same time, and one after the other."""

    workers: int
    parallel_bytes: float
    cyclic_bytes: float

    @property
    def reduction(self) -> float:
        """Share that the cyclic order spares."""
        return 1 - self.cyclic_bytes / self.parallel_bytes if self.parallel_bytes else 0.0


def memory(one: Curve, workers: int) -> Memory:
    """Per worker, of workers that all keep what one keeps, over its iteration.

    Source: Cyclic Data Parallelism, Fig. 4. Exact for the curve.
    """
    return Memory(workers, one.peak_bytes, cyclic(one, workers).peak_bytes)


def _between(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    end: NDArray[np.intp],
    at: NDArray[np.float64],
) -> NDArray[np.float64]:
    """On the lines that end at points `end`."""
    share = (at - x[end - 1]) / (x[end] - x[end - 1])
    return y[end - 1] + (y[end] - y[end - 1]) * share.clip(0, 1)
