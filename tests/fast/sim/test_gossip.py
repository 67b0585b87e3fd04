"""Gossip event by event: closed forms, who is free when, and network cards that are shared."""

import math

import numpy as np
import pytest
from oracle.consensus import exchanging_s, idle_s

from offbeat.gossip.graphs import edge_rates, topology
from offbeat.gossip.simulation import Network, Workers, simulate

PAIR = {(0, 1): 2.0}


def close_to(mean):
    """Five deviations around the mean of a Poisson number."""
    return pytest.approx(mean, abs=5 * math.sqrt(mean))


def test_exchanges_without_a_network_are_a_poisson_process():
    found = simulate(PAIR, Workers([3.0, 1.0]), units=2000)
    assert (found.unit_s, found.end_s) == (2.0, 4000.0)
    assert len(found.exchange_edge) == close_to(4000)
    assert (found.exchange_start_s == found.exchange_end_s).all()
    gaps = np.diff(found.exchange_end_s)
    assert gaps.mean() == pytest.approx(1.0, rel=0.08)
    assert gaps.std() == pytest.approx(1.0, rel=0.08)  # as of exponential times
    assert found.rates() == {(0, 1): pytest.approx(2.0, rel=0.08)}


def test_edges_have_the_rates_that_are_asked_for():
    rates = {(0, 1): 3.0, (0, 2): 1.0, (1, 2): 0.5}
    counts = simulate(rates, Workers([1.0] * 3), units=1000).exchanges()
    for (i, j), rate in rates.items():
        assert counts[i, j] == counts[j, i] == close_to(1000 * rate)


def test_two_workers_on_a_slow_link():
    """A request of .1 s; the end that accepts sends .3 s of bytes, and the other one does when it
    has the answer, .1 s later. The bytes and their confirmation take .1 s each.

    So the first end is over after .5 s. The other one is .1 s later, and cannot wish before.
    """
    network = Network(message_bytes=30, edge_bytes_s={(0, 1): 100.0}, delay_s=0.1)
    found = simulate(PAIR, Workers([2.0, 2.0]), network, units=3000)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), 0.5))
    assert exchanging_s(found) == pytest.approx(np.full(2, seconds.sum()))
    assert len(seconds) == pytest.approx(6000 / (1.0 + 0.1 + 0.5 + 0.05), rel=0.03)


def test_gradients_never_wait():
    """Whatever the network does, a worker computes all the time."""
    rates = edge_rates(topology("star", 5), 4.0)
    slow = Network(message_bytes=10, nic_bytes_s=1.0)
    workers = Workers([1.0, 2.0, 1.0, 4.0, 1.0], jitter=0.3)
    alone, busy = (simulate(rates, workers, one, units=50, seed=3) for one in (None, slow))
    assert alone.gradients().tolist() == busy.gradients().tolist()
    assert busy.gradients() == pytest.approx(busy.end_s / np.array(workers.gradient_s), rel=0.15)
    assert (idle_s(busy) >= 0).all()
    assert idle_s(busy).max() < 12  # the one that was not finished at the end
    for worker in range(5):
        own = busy.gradient_worker == worker
        assert busy.gradient_start_s[own][1:].tolist() == busy.gradient_end_s[own][:-1].tolist()


def test_a_worker_exchanges_with_one_at_a_time_and_requests_are_served():
    rates = edge_rates(topology("ring", 6), 3.0)
    found = simulate(rates, Workers([1.0] * 6), Network(delay_s=0.07), units=400, seed=1)
    for worker in range(6):
        own = (found.exchange_edge == worker).any(axis=1)
        starts, ends = found.exchange_start_s[own], found.exchange_end_s[own]
        order = starts.argsort()
        assert (starts[order][1:] >= ends[order][:-1]).all()
    counts = found.exchanges()
    assert counts[counts > 0].min() > 0.8 * counts.max()


def test_seconds_of_coding_and_cards_of_workers():
    """Both ends code for .5 s, then send 10 bytes at the 5 bytes per second of the slower one."""
    network = Network(10.0, nic_bytes_s=[20.0, 5.0], coding_s=0.5)
    found = simulate({(0, 1): 0.1}, Workers([1.0, 1.0]), network, units=200)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), 2.5))
    assert len(seconds) > 5


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="units"):
        simulate(PAIR, Workers([1.0, 1.0]))
    with pytest.raises(ValueError, match="edge"):
        simulate({(0, 2): 1.0}, Workers([1.0, 1.0]), units=1)
    with pytest.raises(ValueError, match="delay_s"):
        Network(delay_s=-1.0)
