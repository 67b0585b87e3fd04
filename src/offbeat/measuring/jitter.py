"""Jitter: how much compute and messages differ from one time to the next."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SIGMA = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
RANGE = {2: 1.128, 3: 1.693}  # expected range of so few draws of it, in standard deviations
STEADY = 0.03  # what differs by less counts as steady
APART = 3.0  # a rank whose jitter is so many times the typical one has its own


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


def of_ranks(jitters: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """The mean, 0 if it counts as steady; and every rank's own if some are far above the others: a
    few iterations tell jitters apart only by factors."""
    mean = sum(jitters) / len(jitters)
    if max(jitters) > APART * max(median(jitters), STEADY):
        return mean, tuple(j if j > STEADY else 0.0 for j in jitters)
    return (mean if mean > STEADY else 0.0), ()
