"""Graphs of gossip: shapes, rates and constants against other formulas, and bad input."""

import math

import networkx as nx
import numpy as np
import pytest

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


def test_rates_scale_time():
    slow, fast = of("torus", 12), of("torus", 12, rate=4.0)
    assert fast.eta == pytest.approx(4 * slow.eta)
    assert fast.chi1 == pytest.approx(slow.chi1 / 4)
    assert fast.alpha_tilde == pytest.approx(slow.alpha_tilde)


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
    ],
)
def test_shapes(name, n, degrees, edges):
    graph = topology(name, n)
    assert sorted(graph.nodes) == list(range(n))
    assert {degree for _, degree in graph.degree} == degrees
    assert graph.number_of_edges() == edges
    assert parts(graph) == [tuple(range(n))]


def test_edge_rates():
    assert edge_rates(topology("ring", 4), 3.0) == dict.fromkeys(
        [(0, 1), (0, 3), (1, 2), (2, 3)], 1.5
    )
    rates = edge_rates(topology("3-1,0-1,2-1", 4))  # a star around 1, edges the other way round
    assert rates == dict.fromkeys([(0, 1), (1, 2), (1, 3)], 0.5)
    first, again, other = (edge_rates(topology("random-regular", 16, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_large_ring_has_its_closed_form():
    """Of 600 workers, which are too many for a dense matrix; also with one slow edge."""
    n = 600
    rates = edge_rates(topology("ring", n))
    found = constants(rates, n)
    assert found.lambda2 == pytest.approx(1 - math.cos(2 * math.pi / n), rel=1e-9)
    assert found.chi2 == pytest.approx((n - 1) / n)
    path = constants({edge: rate for edge, rate in rates.items() if edge != (0, n - 1)}, n)
    assert path.lambda2 == pytest.approx(1 - math.cos(math.pi / n), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "n", "named"),
    [
        ("ring", 1, "workers"),
        ("cube", 8, "'cube'"),
        ("measured", 8, "'measured'"),
        ("torus", 7, "workers"),
        ("random-regular:3", 5, "degree"),
        ("random-regular:x", 5, "degree"),
        ("random-regular:1", 8, "degree"),
        ("0-1,2-2,1-2", 3, "2-2"),
        ("0-1,2-3,3-4", 5, r"\(2, 3, 4\), \(0, 1\)"),
        ("0-1,1-3", 3, "worker"),
        ("0-1-2", 3, r"\[0, 1, 2\]"),
        ("0-1,x", 3, "0-1,x"),
    ],
)
def test_bad_topologies(name, n, named):
    with pytest.raises(ValueError, match=named):
        topology(name, n)


@pytest.mark.parametrize(
    ("rates", "nodes", "named"),
    [
        ({}, 1, "workers"),
        ({(0, 1): 1.0}, [0, 1, 7, 8], r"\(0, 1\), \(7\), \(8\)"),
        ({(0, 1): 1.0}, [0, 2], "0-1"),
        ({(0, 0): 1.0, (0, 1): 1.0}, 2, "0-0"),
        ({(0, 1): 0.0}, 2, "rate"),
        ({(0, 1): math.nan}, 2, "rate"),
        ({(0, 1): 1e-320}, 2, "eta"),
        ({(0, 1): 1.0, (1, 2): 1e-17}, 3, "lambda_2"),
    ],
)
def test_bad_rates(rates, nodes, named):
    with pytest.raises(ValueError, match=named):
        constants(rates, nodes)
