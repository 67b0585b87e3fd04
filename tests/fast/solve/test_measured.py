"""The graph made from measured links, against every graph there is."""

import math
from itertools import chain, combinations

import networkx as nx
import numpy as np
import pytest

from offbeat.gossip.graphs import constants, edge_rates, topology
from offbeat.gossip.measured_graph import _Search, measured


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


def test_equal_links_make_all_pairs():
    found = measured(np.full((6, 6), 1e6), np.zeros((6, 6)), 1e6)
    assert set(found.rates_per_s) == set(combinations(range(6), 2))
    assert list(found.rates_per_s.values()) == pytest.approx([0.2] * 15)


def test_two_sites_on_a_thin_link():
    """Four workers here, four there: better than every shape with a name."""
    rate, delay = np.full((8, 8), 1e8), np.zeros((8, 8))
    rate[:4, 4:] = rate[4:, :4] = 1e6
    found = measured(rate, delay, 1e6)
    for name in ("ring", "torus", "exponential", "complete", "star"):
        edges = sorted(tuple(sorted(edge)) for edge in topology(name, 8).edges)
        for _, decay, _ in by_hand(edges, 8, rate, delay, 1e6):
            assert found.decay_per_s >= decay * (1 - 1e-9)
    spent = np.zeros(8)
    for edge, one in found.rates_per_s.items():
        spent[list(edge)] += one * 1e6 / rate[edge]
    assert spent.max() == pytest.approx(1)


def test_rates_as_a_job_has_them():
    """With `even` every edge is used as `edge_rates` says, on a graph that is the best of these."""
    rate, delay = links(6, 3)
    found = measured(rate, delay, 1e5, even=True)
    shares = edge_rates(found.graph, 1.0)
    assert len({round(found.rates_per_s[edge] / shares[edge], 6) for edge in shares}) == 1
    assert found.decay_per_s <= measured(rate, delay, 1e5).decay_per_s


def test_the_search_begins_from_a_torus():
    rate, delay = links(6, 1)
    begins = _Search(1e5 / rate + delay, np.inf, 1.0, True, True).starts()
    torus = topology("torus", 6)
    assert any(nx.is_isomorphic(nx.Graph(np.argwhere(one).tolist()), torus) for one in begins)
    _Search(np.ones((5, 5)), np.inf, 1.0, True, True).starts()  # no torus has 5


def test_pairs_that_cannot_reach_each_other_have_no_edge():
    rate, delay = links(5, 0)
    rate[0, 2:] = 0  # one way is enough
    assert set(measured(rate, delay, 1.0).graph[0]) == {1}
    rate[0, 1] = 0
    with pytest.raises(ValueError, match="pair_rate_bytes_s must connect all workers"):
        measured(rate, delay, 1.0)


def test_a_search_of_many_workers_ends_with_its_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.gossip.measured_graph.MOST_WORK", 4e7)
    rate, delay = links(40, 0)
    found = measured(rate, delay, 1e5)
    complete = by_hand(list(combinations(range(40), 2)), 40, rate, delay, 1e5)
    assert found.decay_per_s > max(decay for _, decay, _ in complete)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"message_bytes": 0.0}, "message_bytes (0)"),
        ({"most_per_s": 0.0}, "most_per_s (0)"),
        ({"busy": 1.5}, "busy (1.5)"),
        ({"pair_rate_bytes_s": [[1.0]]}, "pair_rate_bytes_s (shape (1, 1))"),
        ({"pair_delay_s": np.zeros((2, 2))}, "pair_delay_s (2 workers)"),
        ({"pair_delay_s": -np.ones((3, 3))}, "pair_delay_s[0][1] (-1)"),
        ({"pair_rate_bytes_s": np.full((3, 3), math.inf)}, "pair_rate_bytes_s[0][1] (inf)"),
    ],
)
def test_bad_measurements(change, fact):
    told = {"pair_rate_bytes_s": np.ones((3, 3)), "pair_delay_s": np.zeros((3, 3))}
    with pytest.raises(ValueError) as caught:
        measured(**({**told, "message_bytes": 1.0} | change))
    assert fact in str(caught.value)
