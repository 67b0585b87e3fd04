"""Inputs to simulations of workers that do not wait for each other: compute times and servers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import Ranks

LATER_SHARE = 0.95
"""`Server.later_share` of jobs: TCP does not share a link evenly, so equal workers do not stay in
step. With this value twelve of fifteen measured jobs were predicted to 5.2 % (4 and 8 emulated
workers, 25 to 200 Mbit/s, delays of 0 and 20 ms)."""


@dataclass(frozen=True)
class Server:
    """One server's share of a job.

    Attributes:
        size_bytes: bytes of the parameters that the server holds.
        rate: bytes per second that the server receives.
        caps: bytes per second from each worker to this server.
        latency_s: seconds of latency of a message.
        apply_s: seconds of one update on the server.
        send_rate: bytes per second that the server sends; None: `rate`.
        receive_caps: bytes per second from this server to each worker; empty: `caps`.
        later_share: share of a flow in the server's rate, relative to the share of the previous
            flow, in the order in which the present flows began.
    """

    size_bytes: float
    rate: float
    caps: tuple[float, ...]
    latency_s: float = 0.0
    apply_s: float = 0.0
    send_rate: float | None = None
    receive_caps: tuple[float, ...] = ()
    later_share: float = 1.0

    @property
    def exchange_caps(self) -> tuple[float, ...]:
        """Return the bytes per second of each worker in both directions at once."""
        pairs = zip(self.caps, self.receive_caps or self.caps, strict=True)
        return tuple(min(pair) for pair in pairs)


def server_of(profile: Profile, servers: int, ranks: Ranks | None = None) -> Server:
    """Return one of `servers` equal servers on the profile's default link.

    A message to a server takes one delay of the network, and a step of a ring over a distant link
    two, for the request and the chunk. Servers of emulated hosts update without their pace.
    """
    ranks, link = ranks or Ranks(), profile.default_link
    hops = max(2 * (profile.world_size - 1), 1)
    if profile.is_distant(link.name):
        hops *= 2
    rate, workers = link.send_bytes_per_s(profile.world_size), range(profile.world_size)
    caps = [rate * ranks.link_rate(link.name, (n,)) / servers for n in workers]
    receive_caps = [rate * ranks.receive_rate(link.name, n) / servers for n in workers]
    sends, receives = ranks.server_rates.get(link.name, (1.0, 1.0))
    size_bytes = sum(bucket.size_bytes for bucket in profile.buckets)
    return Server(
        size_bytes=size_bytes / servers,
        rate=rate * receives,
        caps=tuple(caps),
        latency_s=link.latency_s / hops,
        apply_s=profile.update_s / (profile.pace or 1.0) / servers,
        send_rate=rate * sends,
        receive_caps=tuple(receive_caps),
        later_share=LATER_SHARE,
    )


def compute_seconds(
    profile: Profile, ranks: Ranks, iterations: int, seed: int
) -> NDArray[np.float64]:
    """Return the compute seconds `[iteration, worker]` without the update."""
    alone_s = profile.forward_s + profile.backward_s
    scale = np.array(ranks.compute_scale(profile))
    noise = ranks.noise(iterations, profile, seed)
    if noise is None:
        noise = np.ones((iterations, profile.world_size))
    return profile.other_s + alone_s * scale[None, :] * noise


def forward_share(profile: Profile) -> float:
    """Return the share of an iteration's compute up to the end of the forward."""
    before_s = profile.other_s + profile.forward_s
    return before_s / (before_s + profile.backward_s + profile.update_s)
