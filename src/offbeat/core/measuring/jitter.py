"""Jitter: how much compute and messages differ from one time to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median

SIGMA = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
RANGE = {2: 1.128, 3: 1.693}  # expected range of so few draws of it, in standard deviations
STEADY = 0.03  # what differs by less counts as steady
APART = 3.0  # a rank whose jitter is so many times the typical one has its own

ALIKE = 1.02  # ranks whose compute times differ by less count as alike
BY_CHANCE = 0.05  # of clusters of like ranks so many may seem to have one that differs


def jitter_of(seconds: Sequence[float]) -> float:
    """Relative standard deviation of a few durations, by medians: one hiccup does not count."""
    typical = median(seconds) if seconds else 0.0
    return SIGMA * median(abs(s - typical) for s in seconds) / typical if typical else 0.0


def spread_of(series: Sequence[Sequence[float]]) -> float:
    """Relative standard deviation within groups of two or three durations, that of the middle
    group: one hiccup does not count. 0 if it counts as steady."""
    found = [
        (max(seconds) - min(seconds)) / RANGE[len(seconds)] / median(seconds)
        for seconds in series
        if len(seconds) in RANGE and median(seconds)
    ]
    spread = median(found) if found else 0.0
    return spread if spread > STEADY else 0.0


def cluster_jitter(jitters: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """The mean, 0 if it counts as steady; and every rank's own if some are far above the others: a
    few iterations tell jitters apart only by factors."""
    mean = sum(jitters) / len(jitters)
    if max(jitters) > APART * max(median(jitters), STEADY):
        return mean, tuple(j if j > STEADY else 0.0 for j in jitters)
    return (mean if mean > STEADY else 0.0), ()


def are_alike(scale: Sequence[float], spreads: Sequence[float], iterations: int) -> bool:
    """Whether ranks' compute times, relative to the mean, differ by no more than `ALIKE`, or than
    what iterations of one rank differ by explains: `spreads` are relative standard deviations."""
    if max(scale) / min(scale) < ALIKE:
        return True
    ranks = len(scale)
    error = math.sqrt(fmean(s * s for s in spreads) / max(1, iterations) * (1 - 1 / ranks))
    beyond = NormalDist().inv_cdf((1 + (1 - BY_CHANCE) ** (1 / ranks)) / 2)
    return max(abs(s - 1) for s in scale) <= beyond * error
