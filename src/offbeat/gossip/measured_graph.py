"""The named graph with the fastest agreement on measured links."""

from __future__ import annotations

from contextlib import suppress

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.gossip.graphs import NAMED, Edge, Rates, constants, edge_rates, topology

LEAST_S = 1e-9  # of an exchange


def best_graph(
    pair_rate_bytes_s: ArrayLike,
    pair_delay_s: ArrayLike,
    message_bytes: float,
    *,
    momentum: bool = True,
) -> nx.Graph:
    """Return the named graph on which workers agree fastest if links are the bottleneck.

    A worker has one exchange at a time, which takes the delay plus the bytes divided by the rate of
    the slower direction. Each graph is used as often as its busiest worker permits. Its workers are
    placed so that neighbours have fast links.

    Args:
        pair_rate_bytes_s: bytes per second from row to column, [N, N].
        pair_delay_s: seconds of delay from row to column, [N, N].
        message_bytes: bytes of an exchange in each direction.
        momentum: whether the method is A2CiD2; otherwise it is AD-PSGD.
    """
    rate, delay = np.asarray(pair_rate_bytes_s), np.asarray(pair_delay_s)
    seconds = np.maximum(delay, delay.T) + message_bytes / np.minimum(rate, rate.T)
    np.fill_diagonal(seconds, 0.0)
    place = dict(enumerate(_nearest_order(seconds)))
    found: list[tuple[float, nx.Graph]] = []
    for name in NAMED:
        with suppress(ValueError):  # a torus is impossible for some numbers of workers
            graph = nx.relabel_nodes(topology(name, len(seconds)), place)
            found.append((decay_per_s(edge_rates(graph), seconds, momentum=momentum), graph))
    return max(found, key=lambda one: one[0])[1]


def decay_per_s(rates: Rates, seconds: NDArray[np.float64], *, momentum: bool) -> float:
    """Return the decay of the distance between workers per second, up to a factor that is common to
    all graphs, if the busiest worker exchanges all the time.

    Args:
        rates: exchanges of each edge, relative to each other.
        seconds: seconds of an exchange, [N, N].
        momentum: whether the method is A2CiD2.
    """
    spent_s = np.zeros(len(seconds))
    for edge, rate in rates.items():
        spent_s[list(edge)] += rate * max(seconds[edge], LEAST_S)
    per_s: dict[Edge, float] = {edge: rate / spent_s.max() for edge, rate in rates.items()}
    found = constants(per_s, len(seconds))
    return found.eta if momentum else found.lambda2


def _nearest_order(seconds: NDArray[np.float64]) -> list[int]:
    """Return all workers, from the one with the fastest links on, each followed by the remaining
    one with the fastest link to it."""
    order = [int(seconds.sum(axis=1).argmin())]
    while len(order) < len(seconds):
        left = [other for other in range(len(seconds)) if other not in order]
        order.append(min(left, key=lambda other: seconds[order[-1], other]))
    return order
