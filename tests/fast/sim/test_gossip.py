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
    assert (found.exchange_wished_s == found.exchange_end_s).all()
    gaps = np.diff(found.exchange_end_s)
    assert gaps.mean() == pytest.approx(1.0, rel=0.08)
    assert gaps.std() == pytest.approx(1.0, rel=0.08)  # as of exponential times
    assert found.rates() == {(0, 1): pytest.approx(2.0, rel=0.08)}
    assert found.forgotten.tolist() == [0, 0]
    assert (found.exchange_by == 0).sum() == close_to(2000)


def test_edges_have_the_rates_that_are_asked_for():
    rates = {(0, 1): 3.0, (0, 2): 1.0, (1, 2): 0.5}
    counts = simulate(rates, Workers([1.0] * 3), units=1000).exchanges()
    for (i, j), rate in rates.items():
        assert counts[i, j] == counts[j, i] == close_to(1000 * rate)


def test_two_workers_on_a_slow_link():
    """Rounds of an exchange of .5 s and of a pause, if neither worker has wished again meanwhile.

    After an exchange 0, 1 or 2 wishes are left, by a Markov chain over its beginnings.
    """
    network = Network(message_bytes=30, edge_bytes_s={(0, 1): 100.0}, delay_s=0.2)
    found = simulate(PAIR, Workers([2.0, 2.0]), network, units=3000)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), 0.5))
    wish = 1 - math.exp(-0.5 * 0.5)  # of one worker, which wishes every 2 s, in .5 s
    none = (1 - wish) ** 2  # wished while nobody's wish was left over
    # Left over at a beginning: 0 or 1 of the two wishes. 1 becomes 1 or 2 at the end; one begins.
    to_one = {0: wish**2, 1: wish}
    one = to_one[0] / (1 - to_one[1] + to_one[0])
    pause = (1 - one) * none * 1.0  # the first of two wishes comes after 1 s in the mean
    assert len(seconds) == pytest.approx(6000 / (0.5 + pause), rel=0.02)
    assert exchanging_s(found) == pytest.approx(np.full(2, 0.5 * len(seconds)))
    wished = len(seconds) + found.forgotten.sum()
    assert wished == close_to(6000)
    assert found.waiting_s().min() > 0


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


def test_a_worker_exchanges_with_one_at_a_time_and_no_wish_waits_in_vain():
    rates = edge_rates(topology("ring", 6), 3.0)
    delays = dict(
        zip(rates, (0.3, 0.41, 0.23, 0.37, 0.29, 0.31), strict=True)
    )  # no two end at once
    found = simulate(rates, Workers([1.0] * 6), Network(delay_s=delays), units=40, seed=1)
    assert found.waiting_s().min() > 0
    for worker in range(6):
        own = (found.exchange_edge == worker).any(axis=1)
        starts, ends = found.exchange_start_s[own], found.exchange_end_s[own]
        assert (starts[1:] >= ends[:-1]).all()
    last_s = found.end_s - 0.5  # what began before has ended, and is not left out
    for by, wished, start in zip(
        found.exchange_by.tolist(), found.exchange_wished_s, found.exchange_start_s, strict=True
    ):
        for now_s in np.linspace(wished, start, 7)[1:-1]:
            if now_s > last_s:
                break
            for neighbour in ((by - 1) % 6, (by + 1) % 6):  # it, or both of these, is busy
                assert busy_at(found, now_s, by) or busy_at(found, now_s, neighbour)


def busy_at(found, now_s, worker):
    under_way = (found.exchange_start_s <= now_s) & (found.exchange_end_s > now_s)
    return bool((found.exchange_edge[under_way] == worker).any())


def test_speeds_change_when_another_exchange_begins():
    """One of .2 s alone on its card, another one joins: bytes are neither lost nor made."""
    rates = {(0, 1): 0.5, (2, 3): 0.5}
    network = Network(message_bytes=10, nic_bytes_s=10.0, hosts=[0, 1, 0, 1])
    found = simulate(rates, Workers([1.0] * 4), network, units=400, seed=5)
    spans = list(zip(found.exchange_start_s, found.exchange_end_s, strict=True))
    together = 0.0
    for start, end in spans:
        shared = sum(max(0.0, min(end, e) - max(start, s)) for s, e in spans) - (end - start)
        together += shared
        if end < found.end_s - 5:  # nothing beside it is unfinished, and therefore left out
            assert end - start - shared / 2 == pytest.approx(1.0)
    assert together > 50
