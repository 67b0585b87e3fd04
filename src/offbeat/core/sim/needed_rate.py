"""Rates of the network that a strategy needs for a given share of computing time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim.prediction import Prediction, predict

if TYPE_CHECKING:
    from offbeat.core.strategy.interface import Strategy

ROUNDING = 1e-9  # relative error of a predicted time


def utilization(prediction: Prediction, profile: Profile) -> float:
    """Return the share of an iteration in which the slowest rank computes, at most 1.

    Args:
        prediction: prediction for the profile.
        profile: profile of the prediction.
    """
    return min(profile.slowest().compute_s / prediction.iteration_s, 1.0)


def rate_grid(first_bps: float, last_bps: float, points: int) -> list[float]:
    """Return ascending rates with equal ratios, both ends included.

    Args:
        first_bps: smallest rate in bit/s, above 0.
        last_bps: largest rate in bit/s.
        points: number of rates, at least 2.
    """
    return np.geomspace(first_bps, last_bps, points).tolist()


def with_rate(profile: Profile, rate_bps: float) -> Profile:
    """Return the profile with another rate of all links.

    Args:
        profile: profile of the job.
        rate_bps: rate in bit/s.
    """
    return extrapolate(profile, rate_bps=rate_bps)


def needed_rates_bps(
    strategy: Strategy,
    profile: Profile,
    targets: Sequence[float],
    rates_bps: Sequence[float],
    *,
    at_rate: Callable[[Profile, float], Profile] = with_rate,
) -> list[float | None]:
    """Return for each target the least rate at which a strategy reaches it.

    For each rate the strategy makes its own plan. A bisection over `rates_bps` finds the least
    rate, because the share of computing time does not fall with the rate; the predictions are
    shared by all targets.

    Args:
        strategy: the strategy.
        profile: profile of the job at any rate.
        targets: shares of computing time, as of `utilization`.
        rates_bps: ascending rates of all links in bit/s.
        at_rate: function of the profile and a rate that returns the profile of a network of that
            rate.

    Returns:
        One rate of `rates_bps` per target, in bit/s; None if the largest rate does not suffice.

    Raises:
        ValueError: a target is not above 0 or above 1, or `rates_bps` is empty or not ascending.
    """
    for target in targets:
        if not 0 < target <= 1:
            raise ValueError(
                f"target ({target:g}) must be above 0 and at most 1; .8 stands for 80 % of the time"
            )
    if not rates_bps or any(b <= a for a, b in pairwise(rates_bps)):
        raise ValueError(
            f"rates_bps ({len(rates_bps)} rates) must be ascending rates; use rate_grid()"
        )

    @cache
    def share(index: int) -> float:
        there = at_rate(profile, rates_bps[index])
        return utilization(predict(strategy, there), there) * (1 + ROUNDING)

    indices = range(len(rates_bps))
    found = [bisect_left(indices, target, key=share) for target in targets]
    return [rates_bps[index] if index < len(rates_bps) else None for index in found]
