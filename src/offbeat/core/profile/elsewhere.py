"""Extrapolation of a profile to another number of ranks, other rates, other jitter or another
device.

All_reduces are assumed to be rings, as in gloo: each of N ranks sends 2 (N - 1) messages of one
N-th of the bytes. So the time of the bytes is proportional to 2 (N - 1) / N, and the latency is
proportional to N - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TypeVar

from offbeat.core.profile.facts import Bucket, Link, Profile
from offbeat.core.profile.records import Points

T = TypeVar("T")
SEGMENT_BITS = 8 * 1448  # payload of a TCP segment on Ethernet
FREE_BYTES_PER_S = 1e15  # rate of messages that take no time
PAYLOAD = 0.94  # payload share of a link's rate in large all_reduces (25 to 200 Mbit/s, gloo)


def extrapolate(
    profile: Profile,
    *,
    hosts: int | None = None,
    rate_bps: float | Mapping[str, float] | None = None,
    jitter: float | None = None,
) -> Profile:
    """Return the profile for another cluster. An argument of None keeps the measured value.

    Args:
        profile: measured profile.
        hosts: number of replicas. Properties of single replicas are repeated in turn.
        rate_bps: rate of all links in bit/s, or a rate for some links by name.
        jitter: relative standard deviation of the compute time of all ranks.

    Raises:
        ValueError: a rank count is below 2, so nothing can be scaled.
    """
    ranks = profile.world_size
    count = ranks if hosts is None else hosts
    rates = {} if rate_bps is None else rate_bps
    if not isinstance(rates, Mapping):
        rates = {link.name: rates for link in profile.links}
    if jitter is not None:
        profile = replace(profile, jitter=jitter, rank_jitter=())
    if count == ranks and not rates:
        return profile
    for name, value in (("hosts", count), ("world_size of the profile", ranks)):
        if value < 2:
            raise ValueError(f"{name} ({value}) must be at least 2; one rank alone sends nothing")
    links = tuple(scale_link(link, ranks, count, rates.get(link.name)) for link in profile.links)
    pairs = {old.name: (old, new) for old, new in zip(profile.links, links, strict=True)}
    steps, noise = (count - 1) / (ranks - 1), profile.noise
    return replace(
        repeated_ranks(profile, count),
        links=links,
        buckets=tuple(_scale_bucket(bucket, pairs, steps) for bucket in profile.buckets),
        noise=None if noise is None else replace(noise, noise_sq=noise.noise_sq * ranks / count),
    )


def with_free_links(profile: Profile) -> Profile:
    """Return the profile with messages that take no time between replicas, of which one alone sends
    none."""
    links = tuple(
        Link(link.name, 0.0, FREE_BYTES_PER_S, asked_rate_bps=link.asked_rate_bps)
        for link in profile.links
    )
    buckets = tuple(replace(bucket, communication_s={}) for bucket in profile.buckets)
    return replace(profile, buckets=buckets, links=links, contention=())


def repeated_ranks(profile: Profile, ranks: int) -> Profile:
    """Return the profile with other ranks and the same costs of messages."""
    return replace(
        profile,
        world_size=ranks,
        topology=_repeat(profile.topology, ranks),
        rank_scale=_repeat(profile.rank_scale, ranks),
        rank_jitter=_repeat(profile.rank_jitter, ranks),
    )


def ring_passes(ranks: int) -> float:
    """Return the number of times that a rank sends each byte of a ring all_reduce."""
    return 2 * (ranks - 1) / ranks


def tcp_rate_bps(rate_bps: float, delay_s: float, loss: float, connections: int) -> float:
    """Return the rate that TCP reaches: at most `sqrt(3 / 2) MSS / (RTT sqrt(loss))` per
    connection.

    Args:
        rate_bps: rate of the network in bit/s.
        delay_s: one-way delay.
        loss: share of lost packets.
        connections: number of connections.

    Source: Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm,
    1997, equation 3.
    """
    if not loss or not delay_s:
        return rate_bps
    one_bps = math.sqrt(1.5 / loss) * SEGMENT_BITS / (2 * delay_s)
    return min(rate_bps, connections * one_bps)


def network_rate_bps(link: Link, ranks: int) -> float:
    """Return the rate of the network in bit/s: the recorded rate, or the one that the link's
    payload rate implies."""
    if link.asked_rate_bps is not None:
        return link.asked_rate_bps
    return 8 * link.bytes_per_s * ring_passes(ranks) / PAYLOAD


def scale_link(link: Link, ranks: int, count: int, rate_bps: float | None) -> Link:
    steps, more = (count - 1) / (ranks - 1), ring_passes(count) / ring_passes(ranks)
    rate, pair = link.bytes_per_s / more, link.pair_bytes_per_s
    if rate_bps is not None:
        reached_bps = tcp_rate_bps(
            rate_bps, link.asked_latency_s, link.asked_loss, link.connections
        )
        known_bps = 8 * link.bytes_per_s * ring_passes(ranks) / PAYLOAD  # may exceed the formula
        reached_bps = max(reached_bps, min(rate_bps, known_bps))
        between = PAYLOAD * reached_bps / 8  # bytes per second between two ranks
        rate, pair = between / ring_passes(count), None if pair is None else between
    faster = rate / link.bytes_per_s

    def scale_points(small: Points, before: float) -> Points:
        least = ((size, max(seconds - size / before, 0.0)) for size, seconds in small)
        return tuple((size, seconds * steps + size / before / faster) for size, seconds in least)

    half = 2 * link.bytes_per_s
    return replace(
        link,
        latency_s=link.latency_s * steps,
        bytes_per_s=rate,
        small=scale_points(link.small, link.bytes_per_s),
        small_halves={
            verb: scale_points(small, link.halves.get(verb, (0.0, half))[1])
            for verb, small in link.small_halves.items()
        },
        halves={verb: (least * steps, r * faster) for verb, (least, r) in link.halves.items()},
        cpu_s_per_message=link.cpu_s_per_message * steps,
        vote_s=None if link.vote_s is None else link.vote_s * steps,
        cpu_s_per_byte=link.cpu_s_per_byte * more,
        asked_rate_bps=link.asked_rate_bps if rate_bps is None else rate_bps,
        pair_bytes_per_s=pair,
    )


def _scale_bucket(bucket: Bucket, links: dict[str, tuple[Link, Link]], steps: float) -> Bucket:
    """Return a bucket whose given message times are scaled as the fitted line of the link."""

    def scale(name: str, seconds: float) -> float:
        if name not in links:  # the link inside a replica stays the same
            return seconds
        before, after = links[name]
        latency_s = min(before.latency_s, seconds)
        beyond_s = (seconds - latency_s) * (before.bytes_per_s / after.bytes_per_s)
        return latency_s * steps + beyond_s

    return bucket.with_given_times(scale)


def _repeat(values: Sequence[T], count: int) -> tuple[T, ...]:
    return tuple(islice(cycle(values), count)) if values else ()
