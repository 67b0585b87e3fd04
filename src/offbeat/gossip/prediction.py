"""Simulated exchanges of a gossip strategy, for reports."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.separate_workers import Server, server_of
from offbeat.gossip.graphs import edge_rates, topology
from offbeat.gossip.measured_graph import measured
from offbeat.gossip.simulation import Network, Timeline, Workers, simulate

if TYPE_CHECKING:
    from offbeat.gossip.strategies import Gossip

UNITS = 100  # simulated units of time
MOST_GRADIENTS = 50_000  # upper bound of simulated gradients, all workers together
SHOWN = 20  # units at the end of the simulation whose gradients and exchanges are listed


def pair_stats(strategy: Gossip, profile: Profile, ranks: Ranks, seed: int = 0) -> dict[str, Any]:
    """Return the exchanges of each pair, and gradients and exchanges of the last units, as JSON
    data.

    Raises:
        ValueError: the topology does not fit the number of workers.
    """
    size_bytes, server = message_bytes(strategy, profile), server_of(profile, 1, ranks)
    timeline = simulate(
        edge_rates(_graph(strategy, server, size_bytes), strategy.rate),
        _workers(profile, ranks),
        Network(size_bytes, server.caps, delay_s=server.latency_s + _coding_s(strategy, profile)),
        units=UNITS,
        gradients=MOST_GRADIENTS,
        seed=seed,
    )
    return _as_json(timeline, size_bytes)


def _workers(profile: Profile, ranks: Ranks) -> Workers:
    compute_s = profile.other_s + profile.forward_s + profile.backward_s + profile.update_s
    gradient_s = [compute_s * scale for scale in ranks.compute_scale(profile)]
    return Workers(gradient_s, fmean(ranks.jitters(profile) or [0.0]))


def _graph(strategy: Gossip, server: Server, size_bytes: int) -> nx.Graph:
    """Return the graph of the topology. A measured topology is computed from the links of the
    workers, because a profile contains no links of pairs.
    """
    workers = len(server.caps)
    if strategy.topology != "measured":
        return topology(strategy.topology, workers)
    rates = np.minimum.outer(server.caps, server.caps)
    delays = np.full_like(rates, server.latency_s)
    return measured(rates, delays, size_bytes, momentum=strategy.momentum, even=True).graph


def message_bytes(strategy: Gossip, profile: Profile) -> int:
    """Return the bytes of an exchange in each direction, with the bucket sizes of the profile as
    sizes in float32.

    The first exchange of an edge sends more, because no codes are possible without anchors.
    """
    total, codec = sum(bucket.size_bytes for bucket in profile.buckets), strategy.codec
    if codec is not None:
        return codec.bytes_of(math.ceil(total / ELEMENT_BYTES))
    return math.ceil(total / 2) if strategy.wire == "bf16" else total


def _coding_s(strategy: Gossip, profile: Profile) -> float:
    """Return the seconds of coding per exchange: each worker encodes its own chunks and decodes
    those of both.
    """
    if strategy.codec is None:
        return 0.0
    speed = profile.codec_speed(strategy.codec.name)
    total = sum(bucket.size_bytes for bucket in profile.buckets)
    passes_s = speed.encode_s_per_pass + 2 * speed.decode_s_per_pass
    per_byte_s = speed.encode_s_per_byte + 2 * speed.decode_s_per_byte
    return passes_s + total * per_byte_s


def _as_json(timeline: Timeline, size_bytes: int) -> dict[str, Any]:
    counts = timeline.exchanges()
    pairs = [(i, j) for i in range(timeline.n) for j in range(i + 1, timeline.n) if counts[i, j]]
    since_s = timeline.end_s - SHOWN * timeline.unit_s
    late = [one for one in timeline.lanes() if one.end_s > since_s]
    return {
        "workers": timeline.n,
        "unit_s": timeline.unit_s,
        "pairs": [[i, j, int(counts[i, j])] for i, j in pairs],
        "gradients": [[one.worker, one.start_s, one.end_s] for one in late if one.partner is None],
        "exchanges": [
            [one.worker, one.partner, one.start_s, one.end_s, size_bytes]
            for one in late
            if one.partner is not None and one.worker < one.partner
        ],
    }
