"""Jitter: relative standard deviations of compute and message times, and tests on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median

SIGMA = 1.4826  # standard deviation / median absolute deviation, of a normal distribution
RANGE = {2: 1.128, 3: 1.693}  # expected range of 2 or 3 normal draws, in standard deviations
STEADY = 0.03  # a smaller jitter counts as 0
APART = 3.0  # jitters are per rank if the largest exceeds `APART` times the median

ALIKE = 1.02  # ratio of compute times up to which ranks count as equally fast
BY_CHANCE = 0.05  # false-positive rate of the test whether ranks differ


def jitter_of(seconds: Sequence[float]) -> float:
    """Return the relative standard deviation of durations, from the median absolute deviation.

    One outlier does not change the result much.
    """
    typical = median(seconds) if seconds else 0.0
    return SIGMA * median(abs(s - typical) for s in seconds) / typical if typical else 0.0


def spread_of(series: Sequence[Sequence[float]]) -> float:
    """Return the median over groups of the relative standard deviation within a group.

    Only groups of two or three durations count. Return 0 below `STEADY`.
    """
    spreads = [
        (max(seconds) - min(seconds)) / RANGE[len(seconds)] / median(seconds)
        for seconds in series
        if len(seconds) in RANGE and median(seconds)
    ]
    spread = median(spreads) if spreads else 0.0
    return spread if spread > STEADY else 0.0


def cluster_jitter(jitters: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """Return (mean jitter, jitter of each rank).

    The second is empty unless one rank's jitter exceeds `APART` times the median: a few iterations
    do not determine smaller differences. Jitters below `STEADY` are 0.
    """
    mean = sum(jitters) / len(jitters)
    if max(jitters) > APART * max(median(jitters), STEADY):
        return mean, tuple(j if j > STEADY else 0.0 for j in jitters)
    return (mean if mean > STEADY else 0.0), ()


def are_alike(scale: Sequence[float], spreads: Sequence[float], iterations: int) -> bool:
    """Whether ranks are equally fast, within `ALIKE` or within the variation of iterations.

    Args:
        scale: compute time of each rank relative to the mean.
        spreads: relative standard deviation of the iterations of each rank.
        iterations: number of measured iterations.
    """
    if max(scale) / min(scale) < ALIKE:
        return True
    ranks = len(scale)
    error = math.sqrt(fmean(s * s for s in spreads) / max(1, iterations) * (1 - 1 / ranks))
    beyond = NormalDist().inv_cdf((1 + (1 - BY_CHANCE) ** (1 / ranks)) / 2)
    return max(abs(s - 1) for s in scale) <= beyond * error


def scale_of_replicas(scale: Sequence[float], nodes: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return the scale of each replica: that of its slowest rank, for which its other ranks wait.

    Args:
        scale: compute time of each rank relative to the mean.
        nodes: ranks of each replica.
    """
    return tuple(max(scale[rank] for rank in node) for node in nodes)
