"""The graph made from measured links, against every graph there is."""

import math
from itertools import chain, combinations

import networkx as nx
import numpy as np
import pytest

from offbeat.gossip.graphs import constants, edge_rates
from offbeat.gossip.measured_graph import measured


def links(n, seed):
    rng = np.random.default_rng(seed)
    rate = np.exp(rng.normal(0, 1, (n, n))) * 1e6
    return rate, rng.uniform(0, 0.5, (n, n))


def seconds(rate, delay, i, j, message_bytes):
    slower = min(rate[i][j], rate[j][i])
    return max(delay[i][j], delay[j][i]) + message_bytes / slower


def by_hand(edges, n, rate, delay, message_bytes, most_per_s=math.inf):
    """Rates and decays of one graph under both rules, edge by edge; none if it falls apart."""
    degree = [sum(k in edge for edge in edges) for k in range(n)]
    if not nx.is_connected(nx.empty_graph(n).__class__(edges)) or 0 in degree:
        return []
    takes = {(i, j): seconds(rate, delay, i, j, message_bytes) for i, j in edges}
    both = [
        {(i, j): 2 / (degree[i] + degree[j]) for i, j in edges},
        {(i, j): min(1 / takes[i, j], most_per_s) / max(degree[i], degree[j]) for i, j in edges},
    ]
    scaled = [as_many_as_fit(rates, takes, n, most_per_s) for rates in both]
    results = []
    for rates in scaled:
        c = constants(rates, n)
        results.append((rates, 1 / math.sqrt(c.chi1 * c.chi2), c.lambda2))
    return results


def as_many_as_fit(found, takes, n, most_per_s):
    edges = list(found)
    spent = [sum(found[e] * takes[e] for e in edges if k in e) for k in range(n)]
    count = [sum(found[e] for e in edges if k in e) for k in range(n)]
    room = min(1 / max(spent), most_per_s / max(count))
    return {edge: one * room for edge, one in found.items()}


def every_graph(n):
    pairs = list(combinations(range(n), 2))
    return chain.from_iterable(combinations(pairs, size) for size in range(n - 1, len(pairs) + 1))


@pytest.mark.parametrize(
    ("n", "seed", "most_per_s", "momentum"),
    [
        (2, 0, math.inf, True),
        (4, 1, math.inf, True),
        (4, 2, 0.4, True),
        (4, 3, math.inf, False),
        (5, 4, math.inf, True),
    ],
)
def test_no_graph_is_better(n, seed, most_per_s, momentum):
    rate, delay = links(n, seed)
    found = measured(rate, delay, 1e6, most_per_s=most_per_s, momentum=momentum)
    place = 1 if momentum else 2
    known = (by_hand(edges, n, rate, delay, 1e6, most_per_s) for edges in every_graph(n))
    best = max(one[place] for both in known for one in both)
    assert found.decay_per_s == pytest.approx(best, rel=1e-9)
    edges = sorted(found.rates_per_s)
    own = max(by_hand(edges, n, rate, delay, 1e6, most_per_s), key=lambda one: one[place])
    assert found.rates_per_s == pytest.approx(own[0])
    assert edges == sorted(tuple(sorted(edge)) for edge in found.graph.edges)


def test_rates_as_a_job_has_them():
    """With `even` every edge is used as `edge_rates` says, on a graph that is the best of these."""
    rate, delay = links(6, 3)
    found = measured(rate, delay, 1e5, even=True)
    shares = edge_rates(found.graph, 1.0)
    assert len({round(found.rates_per_s[edge] / shares[edge], 6) for edge in shares}) == 1
    assert found.decay_per_s <= measured(rate, delay, 1e5).decay_per_s


def test_pairs_that_cannot_reach_each_other_have_no_edge():
    rate, delay = links(5, 0)
    rate[0, 2:] = 0  # one way is enough
    assert set(measured(rate, delay, 1.0).graph[0]) == {1}
    rate[0, 1] = 0
    with pytest.raises(ValueError, match="pair_rate_bytes_s"):
        measured(rate, delay, 1.0)
