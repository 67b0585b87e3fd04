"""Numbers along a timeline: against one large matrix per event, and what must be preserved."""

import numpy as np
import pytest
from oracle.consensus import Quadratic, events, follow

from offbeat.gossip.graphs import constants, edge_rates, topology
from offbeat.gossip.simulation import Network, Workers, simulate


def ring(n, rate=1.0):
    rates = edge_rates(topology("ring", n), rate)
    return rates, constants(rates, n)


def exponential(matrix):
    """Of a symmetric matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(np.exp(values)) @ vectors.T


def in_one_matrix(timeline, c, x):
    """All of x above all of x~; exchanges take effect when they begin."""
    n, state, now_s = timeline.n, np.vstack([x, x]), 0.0
    flow = c.eta * np.kron([[-1.0, 1.0], [1.0, -1.0]], np.eye(n))
    order = np.argsort(timeline.exchange_start_s)
    for at_s, (i, j) in zip(
        timeline.exchange_start_s[order], timeline.exchange_edge[order], strict=True
    ):
        state = exponential(flow * (at_s - now_s) / timeline.unit_s) @ state
        difference = np.zeros((n, 2 * n))
        difference[i, i], difference[i, j] = 1, -1
        difference[j, j], difference[j, i] = 1, -1
        jump = np.vstack([c.alpha * difference, c.alpha_tilde * difference])
        state, now_s = state - jump @ state, at_s
    return (exponential(flow * (timeline.end_s - now_s) / timeline.unit_s) @ state)[:n]


@pytest.mark.parametrize("network", [None, Network(delay_s=0.1)])
def test_equals_one_matrix_per_event(network):
    rates, c = ring(5, 2.0)
    timeline = simulate(rates, Workers([1.0, 1.5, 1.0, 0.5, 1.0]), network, units=12, seed=2)
    x = np.random.default_rng(0).standard_normal((5, 3))
    found = follow(timeline, c, x, readings=7)
    assert len(timeline.exchange_edge) > 30
    np.testing.assert_allclose(found.x, in_one_matrix(timeline, c, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["after_mixing", "before_mixing"])
@pytest.mark.parametrize("network", [None, Network(delay_s=0.3)])
def test_the_mean_is_preserved(order, network):
    """Every fourth worker is half as fast, and gradients come in between."""
    rates, c = ring(8)
    timeline = simulate(rates, Workers.uneven(8, jitter=0.2), network, units=150)
    assert events(timeline) > 1000
    x = np.random.default_rng(1).standard_normal((8, 4)) + 1
    told = {"objective": Quadratic.random(8, 4), "exchange": order}
    assert follow(timeline, c, x, **told).drift.max() < 1e-13
