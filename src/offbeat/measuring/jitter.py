"""Jitter: how much the compute of one rank differs from iteration to iteration."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SIGMA = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution


def jitter_of(seconds: Sequence[float]) -> float:
    """Relative standard deviation of a few durations, by medians: one hiccup does not count."""
    typical = median(seconds) if seconds else 0.0
    return SIGMA * median(abs(s - typical) for s in seconds) / typical if typical else 0.0
