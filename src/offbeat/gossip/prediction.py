"""Prediction of gossip: workers never wait for each other, so each timeline is its own compute.

Exchanges are simulated for reports.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS, Conditions, Prediction
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.gossip.graphs import edge_rates, topology
from offbeat.gossip.measured_graph import best_graph
from offbeat.gossip.simulation import Network, Timeline, Workers, simulate
from offbeat.sessions.separate_workers import Server, compute_seconds, forward_share, server_of

if TYPE_CHECKING:
    from offbeat.gossip.strategies import Gossip

UNITS = 100  # simulated units of time
MOST_GRADIENTS = 50_000  # largest number of simulated gradients of all workers together
SHOWN = 20  # units at the end of the simulation whose gradients and exchanges are listed


def predict_gossip(strategy: Gossip, profile: Profile, conditions: Conditions) -> Prediction:
    """Predict gossip. The duration of an iteration is the compute time of the slowest worker.

    The link carries the bytes of all exchanges at the full rate. If these take longer than an
    iteration, the link is busy for the whole iteration and fewer exchanges happen.
    """
    ranks, seed = conditions.ranks or Ranks(), conditions.seed
    ranks.fit(profile)
    least = RANDOM_ITERATIONS if any(ranks.jitters(profile)) else LEAST_ITERATIONS
    count = max(conditions.iterations or 0, least)
    scale = np.array(ranks.compute_scale(profile))
    compute_s = compute_seconds(profile, ranks, count, seed) + profile.update_s * scale
    ends_s = compute_s.cumsum(axis=0)
    iteration_s = float(ends_s[-1].max()) / count
    server = server_of(profile, 1)
    size_bytes = message_bytes(strategy, profile)
    rate = strategy.rate if profile.world_size > 1 else 0.0
    busy_s = min(rate * size_bytes / server.rate, iteration_s)
    link = profile.default_link.name
    return Prediction(
        strategy=str(strategy),
        iteration_s=iteration_s,
        bound_s=strategy.bound_s(profile),
        exposed_s=0.0,
        idle_s={link: iteration_s - busy_s},
        busy_s={link: busy_s},
        bytes_per_iteration={link: busy_s * server.rate},
        window=range(count),
        steady=False,
        plan=None,
        _traced=lambda: _trace(
            strategy, profile, compute_s, ends_s, _notes(strategy, profile, ranks, seed)
        ),
    )


def _trace(
    strategy: Gossip,
    profile: Profile,
    compute_s: NDArray[np.float64],
    ends_s: NDArray[np.float64],
    notes: dict[str, Any],
) -> Trace:
    """Return one row per worker. Forward includes other time before it, backward includes the
    update.
    """
    count, workers = ends_s.shape
    share = forward_share(profile)
    spans = []
    for n in range(min(workers, MAX_RANKS)):
        for i in range(max(count - LEAST_ITERATIONS, 0), count):
            end, took = float(ends_s[i, n]), float(compute_s[i, n])
            turn = end - (1 - share) * took
            spans.append(Span(n, COMPUTE, "forward", i, end - took, turn))
            spans.append(Span(n, COMPUTE, "backward", i, turn, end))
    return Trace(
        source="simulated",
        strategy=str(strategy),
        ends_s=tuple(map(tuple, ends_s.T.tolist())),
        starts_s=(0.0,) * workers,
        spans=tuple(spans),
        notes=notes,
        uneven=True,
    )


def _notes(strategy: Gossip, profile: Profile, ranks: Ranks, seed: int) -> dict[str, Any]:
    """Return the number of workers and, for at least two, the simulated exchanges of each pair, and
    gradients and exchanges of the last units, as JSON data.

    Raises:
        ValueError: the topology does not fit the number of workers.
    """
    if profile.world_size == 1:
        return {"ranks": 1}
    size_bytes, server = message_bytes(strategy, profile), server_of(profile, 1, ranks)
    gradient_s = [profile.compute_s * scale for scale in ranks.compute_scale(profile)]
    timeline = simulate(
        edge_rates(_graph_of(strategy, server, size_bytes), strategy.rate),
        Workers(gradient_s, fmean(ranks.jitters(profile) or [0.0])),
        Network(
            size_bytes,
            server.exchange_caps,
            delay_s=server.latency_s,
            coding_s=_coding_s(strategy, profile),
        ),
        units=UNITS,
        gradients=MOST_GRADIENTS,
        seed=seed,
    )
    return {"ranks": profile.world_size, "gossip": _as_json(timeline, size_bytes)}


def _graph_of(strategy: Gossip, server: Server, size_bytes: int) -> nx.Graph:
    """Return the graph of the topology. A measured topology is computed from the links of the
    workers, because a profile contains no links of pairs.
    """
    workers = len(server.caps)
    if strategy.topology != "measured":
        return topology(strategy.topology, workers)
    rates = np.minimum.outer(server.exchange_caps, server.exchange_caps)
    delays = np.full_like(rates, server.latency_s)
    return best_graph(rates, delays, size_bytes, momentum=strategy.momentum)


def message_bytes(strategy: Gossip, profile: Profile) -> int:
    """Return the bytes of an exchange in each direction.

    The first exchange of an edge sends more, because no codes are possible without anchors.
    """
    total, codec = sum(bucket.size_bytes for bucket in profile.buckets), strategy.codec
    if codec is not None:
        return codec.bytes_of(math.ceil(total / profile.element_bytes))
    return math.ceil(2 * total / profile.element_bytes) if strategy.wire == "bf16" else total


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
    return passes_s + total * per_byte_s * ELEMENT_BYTES / profile.element_bytes


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
