"""Profiles of clusters and messages that were not measured: networks that numbers describe, nodes
of another number of ranks, messages that are slower or smaller, other passes per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offbeat.core.plan import INSIDE
from offbeat.core.profile import GradientNoise, Link, Profile
from offbeat.core.profile.elsewhere import (
    FREE_BYTES_PER_S,
    PAYLOAD,
    repeated_ranks,
    ring_passes,
    scale_link,
    tcp_rate_bps,
    with_free_links,
)
from offbeat.core.profile.records import Points

# Of an all_reduce of N ranks, measured with gloo: 83 ms with 20 ms of delay each way and 2 ranks,
# 245 ms with 4 ranks, 605 ms with 50 ms and 4 ranks (benchmarks, connections).
DELAYS_PER_STEP = 4.0  # one-way delays per N - 1
STEP_S = 3e-4  # seconds per N - 1 without a delay


def described_link(
    name: str,
    ranks: int,
    rate_bps: float,
    delay_s: float = 0.0,
    loss: float = 0.0,
    connections: int = 1,
) -> Link:
    """Return the link between some ranks on a network that numbers describe.

    Latency follows from the delay, seconds of bytes from `PAYLOAD` of the rate that TCP reaches.

    Args:
        name: name of the link.
        ranks: number of ranks, at least 2.
        rate_bps: smallest rate of a rank, in bits per second.
        delay_s: largest one-way delay between two ranks.
        loss: largest share of lost packets.
        connections: TCP connections between two ranks.
    """
    reached_bps = tcp_rate_bps(rate_bps, delay_s, loss, connections)
    return Link(
        name,
        latency_s=(ranks - 1) * (STEP_S + DELAYS_PER_STEP * delay_s),
        bytes_per_s=PAYLOAD * reached_bps / 8 / ring_passes(ranks),
        asked_rate_bps=rate_bps,
        asked_latency_s=delay_s,
        asked_loss=loss,
        connections=connections,
    )


def on_links(profile: Profile, ranks: int, links: Sequence[Link]) -> Profile:
    """Return the profile of a model on links that were not measured.

    Compute and codecs keep their measured times. Times of messages beside compute are unknown and
    count as free.

    Args:
        profile: measured profile of the model, of any number of ranks.
        ranks: number of ranks.
        links: links between the ranks, the default first; see `described_link`.
    """
    return replace(
        repeated_ranks(with_free_links(profile), ranks),
        links=tuple(links),
        noise=noise_of(profile, profile.world_size / ranks),
    )


def noise_of(profile: Profile, times: float) -> GradientNoise | None:
    """Return the noise of gradients multiplied by `times`; None if it was not measured."""
    noise = profile.noise
    return noise and replace(noise, noise_sq=noise.noise_sq * times)


def with_smaller_messages(profile: Profile, share: float) -> Profile:
    """Return the profile of messages that carry only a share of their bytes, as after a cast.

    Latencies stay, and so do the sizes of buckets.
    """
    latency_s = {link.name: link.latency_s for link in profile.links}

    def shrink(name: str, seconds: float) -> float:
        least_s = min(latency_s[name], seconds)
        return least_s + (seconds - least_s) * share

    return replace(
        profile,
        links=tuple(_with_scaled(link, sizes=1 / share) for link in profile.links),
        buckets=tuple(bucket.with_given_times(shrink) for bucket in profile.buckets),
    )


def with_nodes(profile: Profile, per_node: int, inside_bps: float | None = None) -> Profile:
    """Return the profile of replicas of another number of ranks, and of the same number of nodes.

    A message of all ranks takes one all_reduce inside a node beside its way between nodes, whose
    bytes do not depend on the ranks of a node. Shards have the bytes and the share of the link of
    fewer or more ranks. Compute times are those of a rank, so they stay.

    Args:
        profile: measured profile.
        per_node: number of ranks of each replica.
        inside_bps: rate between the ranks of a node in bit/s; None keeps the measured one.

    Raises:
        ValueError: replicas have unequal numbers of ranks, the rate inside is unknown, or sharded
            replicas would be whole.
    """
    require_equal_sizes(profile.topology, "topology of the profile")
    before = max(profile.topology, default=1)
    if before == per_node and (inside_bps is None or per_node == 1):
        return profile
    if profile.sharded:
        if inside_bps is not None:
            raise ValueError(
                f"inside ({inside_bps / 1e6:g} Mbit/s) must be left out for a profile of sharded "
                "replicas, as messages inside are part of their compute"
            )
        return _with_more_shards(profile, before, per_node)
    if profile.inside is not None and per_node > 1:
        inside = scale_link(profile.inside, before, per_node, inside_bps)
    elif per_node == 1:
        inside = None
    elif inside_bps is not None:
        inside = described_link(INSIDE, per_node, inside_bps)
    else:
        raise ValueError(
            "inside (None) must be the rate between the ranks of a node where the profile is of "
            "single ranks; add --inside 10gbit"
        )
    legs = _legs(profile.inside, inside)
    return replace(
        profile,
        topology=(per_node,) * profile.world_size if per_node > 1 else (),
        inside=inside,
        links=tuple(_with_legs(link, *legs) for link in profile.links),
        buckets=tuple(
            replace(
                bucket,
                communication_s={
                    name: max(0.0, seconds + legs[0] + legs[1] * bucket.size_bytes)
                    for name, seconds in bucket.communication_s.items()
                    if name != INSIDE
                },
            )
            for bucket in profile.buckets
        ),
        contention=tuple(c for c in profile.contention if INSIDE not in c.links),
        noise=noise_of(profile, before / per_node),
    )


def _legs(before: Link | None, after: Link | None) -> tuple[float, float]:
    """Return what the legs inside add to a message: seconds, and seconds per byte."""
    was, will = (
        (0.0, 0.0) if link is None else (link.latency_s, 1 / link.bytes_per_s)
        for link in (before, after)
    )
    return will[0] - was[0], will[1] - was[1]


def _with_legs(link: Link, seconds: float, byte_s: float) -> Link:
    """Return a link between nodes with other legs inside. A half of an all_reduce has one leg."""

    def add_legs(points: Points, part: float) -> Points:
        return tuple((size, max(0.0, s + part * (seconds + byte_s * size))) for size, s in points)

    def line(latency_s: float, rate: float, part: float) -> tuple[float, float]:
        slope = max(1 / rate + part * byte_s, 1e-15)
        return max(0.0, latency_s + part * seconds), 1 / slope

    return link.with_times(line, add_legs)


def _with_more_shards(profile: Profile, before: int, per_node: int) -> Profile:
    if per_node < 2:
        raise ValueError(
            f"per_node ({per_node}) must be at least 2 for a profile of sharded replicas, because "
            "the compute of whole ones was not measured"
        )
    share = before / per_node
    buckets = tuple(
        replace(
            bucket,
            size_bytes=round(bucket.size_bytes * share),
            state_bytes=round(bucket.state_bytes * share),
        )
        for bucket in profile.buckets
    )
    return replace(
        profile,
        topology=(per_node,) * profile.world_size,
        links=tuple(_with_scaled(link, sizes=share) for link in profile.links),
        buckets=buckets,
        noise=noise_of(profile, share),
    )


def with_slower_links(profile: Profile, times: float) -> Profile:
    """Return the profile with message times multiplied by `times`. Coding keeps its measured
    times."""
    buckets = tuple(
        bucket.with_given_times(lambda _, seconds: seconds * times) for bucket in profile.buckets
    )
    links = tuple(_with_scaled(link, times=times) for link in profile.links)
    return replace(profile, links=links, buckets=buckets)


def _with_scaled(link: Link, *, times: float = 1.0, sizes: float = 1.0) -> Link:
    """Return the link with measured times and their sizes multiplied by `times` and `sizes`."""

    def scale(points: Points, _: float = 1.0) -> Points:
        return tuple((round(size * sizes), seconds * times) for size, seconds in points)

    return link.with_times(
        lambda latency_s, rate, _: (latency_s * times, rate * sizes / times),
        scale,
        after_pause=scale(link.after_pause),
        vote_s=link.vote_s and link.vote_s * times,
    )


def with_passes(profile: Profile, passes: int) -> Profile:
    """Return the profile with another number of backward passes per step. `other_s` contains all
    passes but the last one."""
    more_s = (passes - profile.usage.backwards) * (profile.forward_s + profile.backward_s)
    usage = replace(profile.usage, backwards=passes)
    return replace(profile, other_s=max(0.0, profile.other_s + more_s), usage=usage)


def with_free_nodes(profile: Profile, devices: int, measured_devices: int = 1) -> Profile:
    """Return the profile whose replicas each have some ranks, with free messages between them.

    Args:
        profile: profile of replicas.
        devices: number of ranks of each replica.
        measured_devices: number of ranks of a replica as the noise of gradients was measured.
    """
    if devices == measured_devices == 1:
        return profile
    return replace(
        profile,
        topology=(devices,) * profile.world_size if devices > 1 else (),
        inside=Link(INSIDE, 0.0, FREE_BYTES_PER_S) if devices > 1 else None,
        noise=noise_of(profile, measured_devices / devices),
    )


def require_equal_sizes(sizes: Sequence[int], name: str) -> None:
    """Raise ValueError unless all machines have as many devices.

    Args:
        sizes: number of devices of each machine.
        name: what `sizes` are, for the message.
    """
    if len({*sizes}) > 1:
        listed = ", ".join(map(str, sizes))
        raise ValueError(
            f"{name} ({listed}) must be equal, as unequal machines are not predicted; leave out "
            "the smaller ones, or describe them with the ranks that all have"
        )
