"""Needs of methods: the rate for a share of computing time, and machines that still pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from offbeat.core.profile import Link, Profile
from offbeat.core.profile.elsewhere import network_rate_bps, tcp_rate_bps
from offbeat.experiments.advice.methods import Method, SecondsAt
from offbeat.experiments.advice.place import Place

SHARES = (0.5, 0.8, 0.9, 0.95)
TOLERANCE = 1.05  # ratio of neighbouring rates at the end of a search
LEAST_RATE_BPS, MOST_RATE_BPS = 1e5, 1e13
ROUNDING = 1e-9
MOST_MACHINES = 64
MOST_CONNECTIONS = 16
PAYS = 0.5  # share of one machine's speed that a further machine must add


def rates_for(
    share_at: Callable[[float], float], shares: Sequence[float], known: Mapping[float, float]
) -> dict[float, float | None]:
    """Return for each share the least rate at which it is reached, to a relative `TOLERANCE`.

    A greater rate may have a smaller share, as plans change with the rate. The result lies above
    all known rates that do not reach the share.

    Args:
        share_at: share of computing time at a rate in bits per second.
        shares: shares to reach.
        known: shares that are known, by rate.

    Returns:
        Bits per second; None if the share is not reached at `MOST_RATE_BPS`.
    """
    seen = dict(known)

    def reaches(rate_bps: float, share: float) -> bool:
        if rate_bps not in seen:
            seen[rate_bps] = share_at(rate_bps)
        return seen[rate_bps] * (1 + ROUNDING) >= share

    def search(share: float) -> float | None:
        if not reaches(MOST_RATE_BPS, share):
            return None
        lower = max((r for r in seen if not reaches(r, share)), default=LEAST_RATE_BPS)
        if reaches(lower, share):
            return lower
        upper = min(rate_bps for rate_bps in seen if rate_bps > lower)
        while upper > lower * TOLERANCE:
            middle = math.sqrt(lower * upper)
            lower, upper = (lower, middle) if reaches(middle, share) else (middle, upper)
        return upper

    return {share: search(share) for share in sorted(shares)}


def rates_of(
    method: Method, place: Place, shares: Sequence[float] = SHARES
) -> dict[float, float | None]:
    """Return for each share of computing time the least rate of a method in bits per second.

    The share is the compute of the slowest machine divided by the seconds of an iteration. The
    method is planned anew at each rate.

    Args:
        method: the method.
        place: machines and network for which the method was predicted.
        shares: shares to reach.
    """
    needed_s = place.profile.slowest().compute_s

    def share_at(rate_bps: float) -> float:
        return needed_s / method.seconds_at(place.at_rate(rate_bps))

    return rates_for(share_at, shares, {place.rate_bps: needed_s / method.iteration_s})


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


def reached_bps(link: Link, ranks: int) -> float:
    """Return the rate that TCP reaches on all connections of a link together, by its delay and
    loss."""
    rate_bps = network_rate_bps(link, ranks)
    return tcp_rate_bps(rate_bps, link.asked_latency_s, link.asked_loss, link.connections)


def more_connections(place: Place) -> tuple[int, Place] | None:
    """Return the number of TCP connections per link with which estimated messages reach the rates
    of their networks, at most `MOST_CONNECTIONS`, and the place with them; None if loss and delay
    do not limit the rates.
    """
    links, ranks = place.profile.links, place.machines
    counts = [
        math.ceil(link.connections * network_rate_bps(link, ranks) / reached_bps(link, ranks))
        for link in links
    ]
    count = min(max(counts), MOST_CONNECTIONS)
    if not place.estimated or count <= max(link.connections for link in links):
        return None
    return count, place.with_connections(count)
