"""A given profile against the network of the job: a few messages per link, before training."""

from __future__ import annotations

import torch

from offbeat.core.measuring.timing import Budget, Probe, Prober, timed
from offbeat.core.profile import Link, Profile
from offbeat.core.profile.device_speed import compute_s
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective

FIRST_BYTES = 64 * 1024
LONG_S = 0.05  # a message that takes so long, measured or predicted, is large enough
TRIES = 3  # messages of one size, of which the fastest counts: disturbances only delay
RATIO = 2.0  # of measured and predicted seconds, up to which they may differ
SHARE = 0.25  # of an iteration's compute, up to which all gradients together may differ
LEAST_S = 0.005  # up to which they may differ: a busy machine delays messages by as much


def compare_network(cluster: Cluster, profile: Profile) -> str | None:
    """Return how messages differ from the profile's, None if they do not.

    Every rank must call it, and all get the same result.
    """
    if profile.world_size < 2:
        return None
    like = torch.zeros(1, dtype=torch.float32, device=cluster.where)
    for link in profile.links:
        probe = Probe(cluster.groups[link.name], like, cluster.device)
        found = compare_link(
            probe, cluster.links[link.name].collectives.by_verb["all_reduce"], link, profile
        )
        if found is not None:
            return found
    return None


def compare_link(probe: Prober, collective: Collective, link: Link, profile: Profile) -> str | None:
    """The same for one link, with messages that grow until they take `LONG_S` seconds or are as
    large as all gradients."""
    total = sum(bucket.size_bytes for bucket in profile.buckets)
    size, budget = min(FIRST_BYTES, total), Budget(float("inf"), float("inf"))
    while True:
        predicted_s = link.seconds(link.latency_s, size / link.bytes_per_s, size)
        _, *times = timed(probe, collective, [size] * (TRIES + 1), budget)
        measured_s = min(times)
        if size >= total or max(measured_s, predicted_s) >= LONG_S:
            break
        size = min(4 * size, total)
    if max(measured_s, predicted_s) <= RATIO * min(measured_s, predicted_s):
        return None
    if abs(measured_s - predicted_s) * total / size <= max(SHARE * compute_s(profile), LEAST_S):
        return None
    return (
        f"the profile is of another network: {size:,} bytes on link {link.name!r} take "
        f"{1e3 * measured_s:.3g} ms, {1e3 * predicted_s:.3g} ms by the profile"
    )
