"""The graph for measured links: the best one of those that have a name."""

import networkx as nx
import numpy as np
import pytest

from offbeat.gossip.graphs import NAMED, constants, edge_rates, topology
from offbeat.gossip.measured_graph import best_graph, decay_per_s


def test_the_decay_is_that_of_a_busiest_worker_that_never_rests():
    """A star of three: the middle has exchanges of 1 s and 3 s in turn, one of each in 4 s."""
    seconds = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 9.0], [3.0, 9.0, 0.0]])
    rates = edge_rates(nx.Graph([(0, 1), (0, 2)]))
    exact = constants({(0, 1): 0.25, (0, 2): 0.25}, 3)
    assert decay_per_s(rates, seconds, momentum=True) == pytest.approx(exact.eta)
    assert decay_per_s(rates, seconds, momentum=False) == pytest.approx(exact.lambda2)


@pytest.mark.parametrize("momentum", [True, False])
def test_of_equal_links_the_best_named_graph_is_taken(momentum):
    n = 8
    seconds = np.full((n, n), 0.3)
    best = best_graph(np.full((n, n), 1e6), np.full((n, n), 0.2), 1e5, momentum=momentum)
    decays = {
        name: decay_per_s(edge_rates(topology(name, n)), seconds, momentum=momentum)
        for name in NAMED
    }
    found = decay_per_s(edge_rates(best), seconds, momentum=momentum)
    assert found == pytest.approx(max(decays.values()))


def test_a_worker_with_fast_links_is_in_the_middle_of_a_star():
    rate = np.full((6, 6), 1e3)
    rate[4, :] = rate[:, 4] = 1e6
    found = best_graph(rate, np.zeros((6, 6)), 1e5)
    assert {tuple(sorted(edge)) for edge in found.edges} == {
        tuple(sorted((4, other))) for other in range(6) if other != 4
    }


def test_neighbours_of_a_ring_have_the_fast_links():
    """Links of a ring in another order are fast, all others are slow."""
    order, rate = [0, 3, 1, 5, 2, 4], np.full((6, 6), 1e2)
    for i, j in zip(order, [*order[1:], 0], strict=True):
        rate[i, j] = rate[j, i] = 1e6
    found = best_graph(rate, np.zeros((6, 6)), 1e5)
    assert nx.utils.graphs_equal(found, nx.Graph(zip(order, [*order[1:], 0], strict=True)))


def test_any_number_of_workers_has_a_graph():
    for n in (2, 3, 5, 7):
        found = best_graph(np.full((n, n), 1e6), np.zeros((n, n)), 1e5)
        assert set(found) == set(range(n))
        assert nx.is_connected(found)
