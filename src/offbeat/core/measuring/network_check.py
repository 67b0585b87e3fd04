"""Comparison of a given profile with the network of the job, by a few messages per link."""

from __future__ import annotations

import torch

from offbeat.core.measuring.timing import Budget, Probe, measure_messages
from offbeat.core.profile import Link, Profile
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective

FIRST_BYTES = 64 * 1024
LONG_S = 0.05  # sizes grow until a message takes this time, measured or predicted
TRIES = 3  # messages of one size; the fastest counts, because disturbances only delay
RATIO = 2.0  # accepted ratio of measured and predicted seconds
# Accepted difference of measured and predicted seconds of all gradients: `SHARE` of an iteration's
# compute, or `LEAST_S` if that is more, because a busy machine delays messages.
SHARE = 0.25
LEAST_S = 0.005


def compare_network(cluster: Cluster, profile: Profile) -> str | None:
    """Return a description of the first link that differs from the profile; None if none does.

    Every rank must call it. The result is the same on all ranks.
    """
    if profile.world_size < 2:
        return None
    like = torch.zeros(1, dtype=torch.float32, device=cluster.where)
    for link in profile.links:
        connections = cluster.specs[link.name].connections
        if link.connections != connections:
            return (
                f"the profile is of another network: connections of link {link.name!r} are "
                f"{connections} between two ranks, {link.connections} by the profile"
            )
        probe = Probe(cluster.probe_group(link.name), like, cluster.device)
        found = compare_link(
            probe, cluster.links[link.name].collectives.by_verb["all_reduce"], link, profile
        )
        if found is not None:
            return found
    return None


def compare_link(probe: Probe, collective: Collective, link: Link, profile: Profile) -> str | None:
    """Return a description of the difference on one link, or None.

    Message sizes grow until a message takes `LONG_S` seconds or is as large as all gradients.
    """
    total = sum(bucket.size_bytes for bucket in profile.buckets)
    size, budget = min(FIRST_BYTES, total), Budget(float("inf"), float("inf"))
    while True:
        predicted_s = link.all_reduce_s(size)
        _, *times = measure_messages(probe, collective, [size] * (TRIES + 1), budget)
        measured_s = min(times)
        if size >= total or max(measured_s, predicted_s) >= LONG_S:
            break
        size = min(4 * size, total)
    if max(measured_s, predicted_s) <= RATIO * min(measured_s, predicted_s):
        return None
    if abs(measured_s - predicted_s) * total / size <= max(SHARE * profile.compute_s, LEAST_S):
        return None
    return (
        f"the profile is of another network: {size:,} bytes on link {link.name!r} take "
        f"{1e3 * measured_s:.3g} ms, {1e3 * predicted_s:.3g} ms by the profile"
    )
