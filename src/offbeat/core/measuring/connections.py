"""Warm-up traffic on all links before the first recorded iteration.

TCP begins with a small window and enlarges it with every acknowledgement. So the first averages
over a new connection take longer than later ones (measured: 3 % with 4 hosts at 25 Mbit/s, 40 %
with 8 hosts).
"""

from __future__ import annotations

import torch

from offbeat.core.plan import base_link
from offbeat.core.profile import Profile
from offbeat.core.transport.cluster import Cluster

LARGE_MESSAGES = 4  # all-reduces on each link
MESSAGE_S = 2.5  # upper bound of the seconds of a message; its size is reduced to meet it


def open_connections(cluster: Cluster, profile: Profile) -> None:
    """Send messages of the model's size on every link, by all-reduces and by an exchange between
    all pairs of ranks.

    Every rank must call it while its links are idle.
    """
    if cluster.control.world_size == 1:
        return
    with cluster.control.collective("opening connections"):
        for name, link in cluster.links.items():
            load = torch.zeros(
                _bytes(profile, name) // 4, device=cluster.where, dtype=torch.float32
            )
            shards = load[: len(load) // link.collectives.size * link.collectives.size]
            for _ in range(LARGE_MESSAGES):
                link.collectives.by_verb["all_reduce"](load)
            link.collectives.exchange(shards)
            cluster.device.finish()


def _bytes(profile: Profile, name: str) -> int:
    """Return the bytes of the model, or fewer if the link sends fewer in `MESSAGE_S` seconds."""
    facts = profile.link(base_link(name))
    whole = sum(bucket.size_bytes for bucket in profile.buckets)
    return max(1 << 12, min(whole, int(MESSAGE_S * facts.bytes_per_s)))
