"""Workers that do not wait for each other: seconds of their compute, and one endpoint's link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import Ranks


@dataclass(frozen=True)
class Server:
    """One server's share of a job: seconds, bytes and bytes per second.

    `caps[n]` is worker n's rate to this server, `rate` the server's own in each direction;
    `apply_s` what an update takes it.
    """

    size_bytes: float
    rate: float
    caps: tuple[float, ...]
    latency_s: float = 0.0
    apply_s: float = 0.0


def server_of(profile: Profile, servers: int, ranks: Ranks | None = None) -> Server:
    """One of so many servers, on the profile's default link."""
    ranks, link = ranks or Ranks(), profile.default_link
    hops = max(2 * (profile.world_size - 1), 1)
    rate = (
        link.bytes_per_s * hops / profile.world_size
        if profile.world_size > 1
        else (link.bytes_per_s)
    )
    caps = [rate * ranks.link_rate(link.name, (n,)) / servers for n in range(profile.world_size)]
    size_bytes = sum(bucket.size_bytes for bucket in profile.buckets)
    return Server(
        size_bytes=size_bytes / servers,
        rate=rate,
        caps=tuple(caps),
        latency_s=link.latency_s / hops,
        apply_s=profile.update_s / servers,
    )


def compute_seconds(
    profile: Profile, ranks: Ranks, iterations: int, seed: int
) -> NDArray[np.float64]:
    """[iteration, worker], without the update."""
    alone_s = profile.forward_s + profile.backward_s
    scale = np.array(ranks.compute_scale(profile))
    noise = ranks.noise(iterations, profile, seed)
    if noise is None:
        noise = np.ones((iterations, profile.world_size))
    return profile.other_s + alone_s * scale[None, :] * noise
