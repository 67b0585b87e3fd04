"""Graphs of gossip: shapes, rates and constants against other formulas, and bad input."""

import math

import networkx as nx
import numpy as np
import pytest

from offbeat.gossip import graphs
from offbeat.gossip.graphs import constants, edge_rates, parts, topology

ORACLE = [  # of the algorithms' specification, at rate 1: chi1, chi2, eta, alpha~
    ("ring", 4, 1.0, 0.75, 0.577, 0.577),
    ("ring", 8, 3.414, 0.875, 0.289, 0.988),
    ("ring", 16, 13.14, 0.9375, 0.1425, 1.872),
    ("ring", 64, 207.7, 0.984, 0.035, 7.262),
    ("exponential", 8, 1.25, 0.889, 0.474, 0.593),
    ("exponential", 64, 2.75, 1.001, 0.301, 0.829),
    ("star", 8, 4.0, 2.0, 0.177, 0.707),
    ("complete", 8, 0.875, 0.875, 0.571, 0.5),
]


def of(name, n, rate=1.0, **kwargs):
    return constants(edge_rates(topology(name, n, **kwargs), rate), n)


@pytest.mark.parametrize(("name", "n", "chi1", "chi2", "eta", "alpha_tilde"), ORACLE)
def test_constants_of_known_graphs(name, n, chi1, chi2, eta, alpha_tilde):
    found = of(name, n)
    pairs = [(found.chi1, chi1), (found.chi2, chi2), (found.alpha_tilde, alpha_tilde)]
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in pairs)
    assert found.eta == pytest.approx(eta, rel=1e-3, abs=5e-4)  # .035 has two digits
    assert (found.alpha, found.lambda2 * found.chi1) == (0.5, pytest.approx(1, rel=1e-12))


@pytest.mark.parametrize("seed", range(6))
def test_constants_by_another_way(seed):
    """Resistances by solving for potentials with one worker grounded; lambda_2 as a minimum."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 12))
    graph = nx.random_labeled_tree(n, seed=seed)
    graph.add_edges_from(rng.choice(n, 2, replace=False) for _ in range(n))
    names = rng.permutation(100)[:n]  # ranks need not be 0..n-1
    rates = {(i, j): float(rng.uniform(0.1, 3)) for i, j in edge_rates(graph)}
    found = constants(
        {(int(names[i]), int(names[j])): rate for (i, j), rate in rates.items()},
        [int(name) for name in names],
    )
    flow = np.zeros((n, n))
    for (i, j), rate in rates.items():
        flow[i, i] += rate
        flow[j, j] += rate
        flow[i, j] -= rate
        flow[j, i] -= rate
    resistances = []
    for i, j in rates:
        current = np.zeros(n)
        current[i], current[j] = 1, -1
        potential = np.append(0.0, np.linalg.solve(flow[1:, 1:], current[1:]))
        resistances.append(potential[i] - potential[j])
    chi1 = 1 / np.sort(np.linalg.eigvals(flow).real)[1]
    chi2 = max(resistances) / 2
    assert (found.chi1, found.chi2) == (pytest.approx(chi1), pytest.approx(chi2))
    assert found.eta == pytest.approx(1 / (2 * math.sqrt(chi1 * chi2)))
    assert found.alpha_tilde == pytest.approx(math.sqrt(chi1 / chi2) / 2)


@pytest.mark.parametrize("n", [7, 8, 64])
@pytest.mark.parametrize("name", ["ring", "exponential", "complete", "torus"])
def test_constants_of_large_graphs_are_those_of_a_matrix(monkeypatch, name, n):
    if name == "torus" and n == 7:
        return  # has one row
    dense = of(name, n)
    monkeypatch.setattr(graphs, "MOST_DENSE", 0)
    found = of(name, n)
    assert found.lambda2 == pytest.approx(dense.lambda2, rel=1e-10)
    assert (found.chi2, found.eta) == (pytest.approx(dense.chi2), pytest.approx(dense.eta))


def test_a_large_graph_with_one_slow_edge_is_no_ring(monkeypatch):
    rates = edge_rates(topology("ring", 12)) | {(3, 4): 0.01}
    dense = constants(rates, 12)
    monkeypatch.setattr(graphs, "MOST_DENSE", 0)
    assert constants(rates, 12) == dense


def test_rates_scale_time():
    slow, fast = of("torus", 12), of("torus", 12, rate=4.0)
    assert fast.eta == pytest.approx(4 * slow.eta)
    assert fast.chi1 == pytest.approx(slow.chi1 / 4)
    assert fast.alpha_tilde == pytest.approx(slow.alpha_tilde)


def test_plain_gossip_leaves_the_second_copy_alone():
    plain = of("ring", 8).as_ad_psgd()
    assert (plain.eta, plain.alpha, plain.alpha_tilde) == (0.0, 0.5, 0.5)
    assert plain.lambda2 == of("ring", 8).lambda2


def test_edge_rates():
    assert edge_rates(topology("ring", 4), 3.0) == dict.fromkeys(
        [(0, 1), (0, 3), (1, 2), (2, 3)], 1.5
    )
    rates = edge_rates(topology("3-1,0-1,2-1", 4))  # a star around 1, edges the other way round
    assert rates == dict.fromkeys([(0, 1), (1, 2), (1, 3)], 0.5)


@pytest.mark.parametrize(
    ("name", "n", "degrees", "edges"),
    [
        ("complete", 5, {4}, 10),
        ("ring", 5, {2}, 5),
        ("ring", 2, {1}, 1),
        ("star", 5, {1, 4}, 4),
        ("exponential", 8, {5}, 20),
        ("exponential", 6, {4}, 12),  # 4 steps one way are 2 the other way
        ("exponential", 3, {2}, 3),
        ("torus", 4, {2}, 4),
        ("torus", 8, {3}, 12),
        ("torus", 12, {4}, 24),
        ("random-regular", 9, {4}, 18),
        ("random-regular", 4, {3}, 6),
        ("random-regular:3", 10, {3}, 15),
        ([(0, 1), (1, 2), (1, 0)], 3, {1, 2}, 2),
        (nx.path_graph(4), 4, {1, 2}, 3),
    ],
)
def test_shapes(name, n, degrees, edges):
    graph = topology(name, n)
    assert sorted(graph.nodes) == list(range(n))
    assert {degree for _, degree in graph.degree} == degrees
    assert graph.number_of_edges() == edges
    assert parts(graph) == [tuple(range(n))]


def test_random_graphs_are_the_same_for_the_same_seed():
    first, again, other = (edge_rates(topology("random-regular", 16, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_given_graph_is_left_alone():
    graph = nx.path_graph(3)
    topology(graph, 3).remove_node(1)
    assert graph.number_of_nodes() == 3


def test_parts():
    graph = nx.Graph([(4, 5), (0, 9), (2, 3), (3, 1)])
    assert parts(graph) == [(1, 2, 3), (0, 9), (4, 5)]


@pytest.mark.parametrize(
    ("name", "n", "facts"),
    [
        ("ring", 1, ["workers (1)", "at least 2"]),
        ("cube", 8, ["'cube'", "ring", "random-regular"]),
        ("measured", 8, ["'measured'", "needs links"]),
        ("torus", 7, ["workers (7)", "6 or 8"]),
        ("torus", 3, ["workers (3)", "take 4"]),
        ("random-regular:3", 5, ["degree (3)", "take 4 workers"]),
        ("random-regular:5", 5, ["degree (5)", "take 6 workers"]),
        ("random-regular:0", 5, ["degree (0)"]),
        ("random-regular:x", 5, ["degree ('x')"]),
        ("random-regular:1", 8, ["degree (1)", "at least 3"]),
        ("0-1,2-2,1-2", 3, ["2-2", "self loops"]),
        ("0-1,2-3,3-4", 5, ["(2, 3, 4), (0, 1)", "connected"]),
        ("0-1", 3, ["(0, 1), (2)"]),
        ("0-1,1-3", 3, ["worker (3)", "0..2"]),
        ("0-1-2", 3, ["[0, 1, 2]"]),
        ("0-1,x", 3, ["'0-1,x'", "0-1,1-2"]),
        ([(0, 1, 2)], 3, ["(0, 1, 2)"]),
        (nx.Graph([("a", "b")]), 2, ["'a'"]),
        (nx.DiGraph([(0, 1)]), 2, ["DiGraph", "undirected"]),
        (nx.MultiGraph([(0, 1)]), 2, ["MultiGraph"]),
    ],
)
def test_bad_topologies(name, n, facts):
    with pytest.raises(ValueError) as caught:
        topology(name, n)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_bad_rate(rate):
    with pytest.raises(ValueError, match=r"rate \((0|-1|nan|inf)\)"):
        edge_rates(topology("ring", 4), rate)


@pytest.mark.parametrize(
    ("rates", "nodes", "facts"),
    [
        ({}, 1, ["workers (1)"]),
        ({(0, 1): 1.0}, [0, 1, 7, 8], ["(0, 1), (7), (8)"]),
        ({(0, 1): 1.0}, [0, 2], ["0-1"]),
        ({(0, 0): 1.0, (0, 1): 1.0}, 2, ["0-0"]),
        ({(0, 1): 0.0}, 2, ["rate (0)", "0-1"]),
        ({(0, 1): math.nan}, 2, ["rate (nan)"]),
        ({(0, 1): 1e-320}, 2, ["eta", "inf"]),
        ({(0, 1): 1.0, (1, 2): 1e-17}, 3, ["lambda_2", "rounding"]),
    ],
)
def test_bad_rates(rates, nodes, facts):
    with pytest.raises(ValueError) as caught:
        constants(rates, nodes)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize("rate", [1e-200, 1e200])
def test_extreme_rates_do_not_overflow(rate):
    assert constants(dict.fromkeys([(0, 1), (1, 2)], rate), 3).alpha_tilde == pytest.approx(
        constants({(0, 1): 1.0, (1, 2): 1.0}, 3).alpha_tilde
    )
