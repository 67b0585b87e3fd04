"""Needs of methods: the rate for a share of computing time, and machines that still pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count

from offbeat.core.profile import Profile
from offbeat.experiments.advice.methods import SecondsAt
from offbeat.experiments.advice.place import Place

SHARES = (0.5, 0.8, 0.9, 0.95)
TOLERANCE = 1.05  # ratio of neighbouring rates at the end of a search
LEAST_RATE_BPS, MOST_RATE_BPS = 1e5, 1e13
ROUNDING = 1e-9
CONVEX_ROUNDING = 1e-6  # waiting above a chord that counts as rounding, relative
LIMIT_TOLERANCE = 1.01  # ratio of neighbouring rates at the end of a search by a limit
MOST_MACHINES = 64
MOST_CONNECTIONS = 16
PAYS = 0.5  # share of one machine's speed that a further machine must add


def rates_for(  # noqa: C901
    share_at: Callable[[float], float],
    shares: Sequence[float],
    *,
    known: Mapping[float, float],
    limit_at: Callable[[float], float] | None = None,
) -> dict[float, float | None]:
    """Return for each share the least rate at which it is reached, to a relative `TOLERANCE`.

    The seconds of a plan are convex in the seconds of its messages, so waiting per compute,
    `1 / share - 1`, is convex in the reciprocal of the rate. It lies below the chord of two rates
    and above the extensions of chords. Chords of few rates determine the result, and all shares use
    the rates that were tried for one share. Plans change with the rate: where shares contradict
    convexity, the result is bracketed by two rates instead. A greater rate may have a smaller
    share; the result lies above every rate that was tried and does not reach the share.

    Args:
        share_at: share of computing time at a rate in bits per second.
        shares: shares to reach.
        known: shares that are known, by rate; at least one.
        limit_at: upper limit of the share at a rate, which does not fall with the rate and costs
            much less than `share_at`; None if there is none.

    Returns:
        Bits per second; None if the share is not reached at `MOST_RATE_BPS`.
    """
    seen, limits = dict(known), dict[float, float]()

    def search(share: float) -> float | None:  # noqa: C901
        lower = max((r for r, s in seen.items() if s < share), default=None)
        upper = min((r for r in seen if lower is None or r > lower), default=None)
        if limit_at is not None:
            least = _least_rate(limit_at, share, lower or LEAST_RATE_BPS, upper or MOST_RATE_BPS)
            if least is None and upper is None:
                return None
            if least is not None and least > (lower or LEAST_RATE_BPS):
                lower = least
                limits[lower] = min(limit_at(lower), share)
        if upper is None:
            upper = MOST_RATE_BPS
            if _share(share_at, seen, upper) < share:
                return None
        if lower is None:
            lower = LEAST_RATE_BPS
            if _share(share_at, seen, lower) >= share:
                return lower
        for step in count():
            least, enough = _range_of(seen, lower, upper, share)
            if enough <= least * TOLERANCE:
                return enough
            rate_bps = math.sqrt(least * enough)
            if step % 3 < 2 and least <= lower * (1 + ROUNDING):
                rate_bps = _interpolated_rate(lower, upper, limits | seen, share)
                # The bracket ends as soon as both of its ends are near the result.
                rate_bps *= TOLERANCE ** (0.4 if step % 3 == 0 else -0.4)
            margin = TOLERANCE**0.2
            rate_bps = min(max(rate_bps, lower * margin), upper / margin)
            if _share(share_at, seen, rate_bps) < share:
                lower = rate_bps
            else:
                upper = rate_bps
        raise AssertionError

    while True:
        found = {share: search(share) for share in sorted(shares)}
        if not any(
            rate is not None and any(r > rate and s < share for r, s in seen.items())
            for share, rate in found.items()
        ):
            return found


def _range_of(
    seen: Mapping[float, float], lower: float, upper: float, share: float
) -> tuple[float, float]:
    """Return a rate below which the share is not reached, and one from which it is, if waiting is
    convex in the reciprocal of the rate; otherwise, or if the share at `lower` is unknown, `lower`
    and `upper`.

    Args:
        seen: shares by rate.
        lower: greatest rate that does not reach the share.
        upper: least rate above `lower`.
        share: share to reach.
    """
    if lower not in seen:
        return lower, upper
    wanted = 1 / share - 1
    slow, fast = _point(seen, lower), _point(seen, upper)
    slower = max((rate for rate in seen if rate < lower), default=None)
    faster = min((rate for rate in seen if rate > upper), default=None)
    enough = _crossing(slow, fast, wanted)
    least = slow[0]
    for near, far, opposite in ((slow, slower, fast), (fast, faster, slow)):
        if far is None:
            continue
        beyond = _point(seen, far)
        slope = (near[1] - beyond[1]) / (near[0] - beyond[0])
        extended = near[1] + slope * (opposite[0] - near[0])
        if extended > opposite[1] + CONVEX_ROUNDING * (1 + abs(opposite[1])):
            return lower, upper
        if slope > 0:
            least = min(least, near[0] + (wanted - near[1]) / slope)
    return 1 / max(least, enough), 1 / enough


def _point(seen: Mapping[float, float], rate_bps: float) -> tuple[float, float]:
    """Return the reciprocal of a rate, and waiting per compute there."""
    return 1 / rate_bps, 1 / seen[rate_bps] - 1


def _crossing(slow: tuple[float, float], fast: tuple[float, float], wanted: float) -> float:
    """Return the reciprocal of the rate at which the chord of two points has this waiting."""
    part = (wanted - fast[1]) / (slow[1] - fast[1]) if slow[1] > fast[1] else 0.0
    return fast[0] + part * (slow[0] - fast[0])


def _least_rate(
    limit_at: Callable[[float], float], share: float, lower: float, upper: float
) -> float | None:
    """Return a rate below which a limit is below the share, nearly the greatest one; None if the
    limit is below the share at `upper`."""
    if limit_at(upper) * (1 + ROUNDING) < share:
        return None
    if limit_at(lower) * (1 + ROUNDING) >= share:
        return lower
    while upper > lower * LIMIT_TOLERANCE:
        middle = math.sqrt(lower * upper)
        if limit_at(middle) * (1 + ROUNDING) < share:
            lower = middle
        else:
            upper = middle
    return lower


def _share(share_at: Callable[[float], float], seen: dict[float, float], rate_bps: float) -> float:
    if rate_bps not in seen:
        seen[rate_bps] = share_at(rate_bps) * (1 + ROUNDING)
    return seen[rate_bps]


def _interpolated_rate(
    lower: float, upper: float, seen: Mapping[float, float], share: float
) -> float:
    """Return the rate at which the chord of two rates has the waiting of the share."""
    return 1 / _crossing(_point(seen, lower), _point(seen, upper), 1 / share - 1)


def rates_of(
    seconds_at: SecondsAt,
    place: Place,
    shares: Sequence[float] = SHARES,
    *,
    now_s: float,
    bound_at: SecondsAt | None = None,
) -> dict[float, float | None]:
    """Return for each share of computing time the least rate of a method in bits per second.

    The share is the compute of the slowest machine divided by the seconds of an iteration. The
    method is planned anew at each rate.

    Args:
        seconds_at: seconds per iteration of the method in a place.
        place: machines and network.
        shares: shares to reach.
        now_s: seconds per iteration in this place.
        bound_at: lower bound of `seconds_at`; None if there is none.
    """
    needed_s = place.profile.slowest().compute_s

    def share_at(rate_bps: float) -> float:
        return needed_s / seconds_at(place.at_rate(rate_bps))

    known = {place.rate_bps: needed_s / now_s * (1 + ROUNDING)}

    def limit_at(rate_bps: float) -> float:
        assert bound_at is not None
        return needed_s / bound_at(place.at_rate(rate_bps))

    return rates_for(share_at, shares, known=known, limit_at=bound_at and limit_at)


def last_paying_machine(seconds_at: SecondsAt, place: Place, most: int = MOST_MACHINES) -> int:
    """Return the number of machines beyond which a further one adds less than `PAYS` of the speed
    of one machine alone.

    Where each byte of a ring is sent again by each further machine, the first ones may add less
    than later ones. So the search begins with the largest numbers. `most` means that even the last
    machine pays.

    Args:
        seconds_at: seconds per iteration of the method in a place.
        place: machines and network.
        most: largest number of machines.
    """
    alone_s = place.fastest_machine.compute_s

    @cache
    def speed(machines: int) -> float:
        if machines == 1:
            return 1 / alone_s
        there = place.with_machines(machines)
        return there.batches / seconds_at(there)

    def pays(machines: int) -> bool:
        return speed(machines + 1) - speed(machines) >= PAYS / alone_s

    above, below = most, most - 1
    while below and not pays(below):
        above, below = below, below * 2 // 3
    while above - below > 1:
        middle = (below + above) // 2
        if pays(middle):
            below = middle
        else:
            above = middle
    return above


def critical_machines(profile: Profile) -> float | None:
    """Return the number of machines at which the same loss needs twice the samples; None if the
    noise of gradients was not measured.

    N machines that average every gradient train with N batches at once and need `1 + N / N_crit`
    times the least number of samples. `N_crit` is the trace of the covariance of one batch's
    gradient divided by the squared norm of the gradient, which is `K noise_sq / gradient_sq` for a
    profile of K ranks. It belongs to the measured iterations; later in training it is greater.

    Source: McCandlish et al., An empirical model of large-batch training, 2018, equations 2.8 and
        5.1.
    """
    noise = profile.noise
    if noise is None or not noise.gradient_sq > 0:
        return None
    return profile.world_size * noise.noise_sq / noise.gradient_sq


def more_connections(place: Place) -> tuple[int, Place] | None:
    """Return the number of TCP connections per link with which the networks reach their rates, at
    most `MOST_CONNECTIONS`, and the place with them; None if loss and delay do not limit the rate.
    """
    counts = [
        math.ceil(network.connections * network.rate_bps / network.tcp_rate_bps)
        for network in place.networks
    ]
    count = min(max(counts, default=0), MOST_CONNECTIONS)
    if count <= max((network.connections for network in place.networks), default=0):
        return None
    return count, place.with_connections(count)
