"""Gossip event by event: closed forms, who is free when, and network cards that are shared."""

import math

import numpy as np
import pytest

from offbeat.sim.gossip import Network, Workers, poisson, simulate
from offbeat.solve.graphs import edge_rates, topology

PAIR = {(0, 1): 2.0}


def close_to(mean):
    """Five deviations around the mean of a Poisson number."""
    return pytest.approx(mean, abs=5 * math.sqrt(mean))


def test_exchanges_without_a_network_are_a_poisson_process():
    found = simulate(PAIR, Workers([3.0, 1.0]), units=2000)
    assert (found.unit_s, found.end_s) == (2.0, 4000.0)
    assert len(found.exchange_edge) == close_to(4000)
    assert (found.exchange_rang_s == found.exchange_end_s).all()
    gaps = np.diff(found.exchange_end_s)
    assert gaps.mean() == pytest.approx(1.0, rel=0.08)
    assert gaps.std() == pytest.approx(1.0, rel=0.08)  # as of exponential times
    assert found.rates() == {(0, 1): pytest.approx(2.0, rel=0.08)}
    assert not found.unheard


def test_exchanges_alone_have_the_same_rates():
    rates = {(0, 1): 2.0, (1, 2): 0.5}
    found = poisson(rates, 3, 1000)
    counts = found.exchanges()
    assert (counts[0, 1], counts[1, 2], counts[0, 2]) == (close_to(2000), close_to(500), 0)
    assert (np.diff(found.exchange_end_s) >= 0).all()
    assert (found.unit_s, found.end_s, found.gradients().tolist()) == (1.0, 1000, [0, 0, 0])
    again, other = (poisson(rates, 3, 1000, seed=seed).exchange_end_s for seed in (0, 1))
    assert again.tolist() == found.exchange_end_s.tolist() != other.tolist()


def test_two_workers_on_a_slow_link():
    """A clock that rings after 1 s in the mean, then an exchange of .5 s: rounds of 1.5 s."""
    network = Network(message_bytes=30, edge_bytes_s={(0, 1): 100.0}, delay_s=0.2)
    found = simulate(PAIR, Workers([2.0, 2.0]), network, units=3000)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), 0.5))
    assert len(seconds) == pytest.approx(6000 / 1.5, rel=0.05)
    assert found.unheard[0, 1] == close_to(2000)  # a third of the time
    assert found.exchanging_s() == pytest.approx([2000, 2000], rel=0.05)
    assert found.waiting_s().tolist() == [0, 0]


def test_gradients_never_wait():
    """Whatever the network does, a worker computes all the time."""
    rates = edge_rates(topology("star", 5), 4.0)
    slow = Network(message_bytes=10, nic_bytes_s=1.0)
    workers = Workers([1.0, 2.0, 1.0, 4.0, 1.0], jitter=0.3)
    alone, busy = (simulate(rates, workers, one, units=50, seed=3) for one in (None, slow))
    assert alone.gradients().tolist() == busy.gradients().tolist()
    assert busy.gradients() == pytest.approx(busy.end_s / np.array(workers.gradient_s), rel=0.15)
    assert (busy.idle_s() >= 0).all()
    assert busy.idle_s().max() < 12  # the one that was not finished at the end
    for worker in range(5):
        own = busy.gradient_worker == worker
        assert busy.gradient_start_s[own][1:].tolist() == busy.gradient_end_s[own][:-1].tolist()


def test_a_worker_exchanges_with_one_at_a_time_the_oldest_first():
    rates = edge_rates(topology("complete", 6), 6.0)
    found = simulate(rates, Workers([1.0] * 6), Network(delay_s=0.3), units=40, seed=1)
    assert found.waiting_s().min() > 0
    for worker in range(6):
        own = (found.exchange_edge == worker).any(axis=1)
        starts, ends = found.exchange_start_s[own], found.exchange_end_s[own]
        assert (starts[1:] >= ends[:-1]).all()
    # One that waited longer, with both ends free, would have been started instead.
    for (i, j), rang, start in rows(found):
        if rang == start:
            continue
        for (a, b), other_rang, other_start in rows(found):
            if other_rang < rang and other_start > start and {a, b} & {i, j}:
                assert busy_at(found, start, {a, b} - {i, j})


def rows(found):
    return list(
        zip(
            found.exchange_edge.tolist(),
            found.exchange_rang_s.tolist(),
            found.exchange_start_s.tolist(),
            strict=True,
        )
    )


def busy_at(found, now, workers):
    under_way = (found.exchange_start_s <= now) & (found.exchange_end_s > now)
    return bool(workers & set(found.exchange_edge[under_way].ravel().tolist()))


def test_a_saturated_worker_is_busy_all_the_time():
    """The middle of a star with more to do than it can."""
    rates = edge_rates(topology("star", 5), 20.0)
    found = simulate(rates, Workers([1.0] * 5), Network(delay_s=0.5), units=100)
    assert found.exchanging_s()[0] > 95
    counts = found.exchanges()[0, 1:]
    assert counts.sum() == pytest.approx(200, abs=5)
    assert counts.min() > 45  # nobody starves


@pytest.mark.parametrize(("hosts", "takes"), [([0, 1, 2, 3], 1.0), ([0, 1, 0, 1], 2.0)])
def test_exchanges_share_a_network_card(hosts, takes):
    """Two exchanges that never end, of four workers on four hosts or on two."""
    rates = {(0, 1): 1e6, (2, 3): 1e6}
    network = Network(message_bytes=10, nic_bytes_s=10.0, hosts=hosts)
    found = simulate(rates, Workers([1.0] * 4), network, units=50)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), takes), rel=1e-4)
    assert len(seconds) == pytest.approx(100 / takes, abs=2)


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
        assert end - start - shared / 2 == pytest.approx(1.0)
    assert together > 50


def test_workers_of_one_host_need_no_card():
    network = Network(message_bytes=10, nic_bytes_s=10.0, hosts=[0, 0])
    found = simulate(PAIR, Workers([1.0, 1.0]), network, units=20)
    assert found.exchanging_s().tolist() == [0, 0]


def test_the_slower_card_counts():
    network = Network(message_bytes=10, nic_bytes_s=[5.0, 20.0], edge_bytes_s={(0, 1): 8.0})
    found = simulate(PAIR, Workers([1.0, 1.0]), network, units=50)
    seconds = found.exchange_end_s - found.exchange_start_s
    assert seconds == pytest.approx(np.full(len(seconds), 2.0))


def test_it_stops_with_the_last_gradient():
    found = simulate(PAIR, Workers([1.0, 3.0]), gradients=9)
    assert (found.end_s, found.gradients().tolist()) == (7.0, [7, 2])
    assert found.idle_s().tolist() == [0, 1]


def test_jitter_has_the_deviation_that_is_asked_for():
    found = simulate(PAIR, Workers([1.0, 2.0], jitter=0.2), units=3000)
    seconds = found.gradient_end_s - found.gradient_start_s
    for worker, mean in enumerate((1.0, 2.0)):
        own = seconds[found.gradient_worker == worker]
        assert own.mean() == pytest.approx(mean, rel=0.02)
        assert own.std() / own.mean() == pytest.approx(0.2, rel=0.1)


def test_lanes_hold_everything_once():
    found = simulate(PAIR, Workers([1.0, 2.0]), Network(delay_s=0.1), units=10)
    lanes = list(found.lanes())
    gossip = [one for one in lanes if one.lane == "gossip"]
    assert len(lanes) - len(gossip) == found.gradients().sum()
    assert len(gossip) == 2 * len(found.exchange_edge) == found.exchanges().sum()
    assert {(one.worker, one.partner) for one in gossip} == {(0, 1), (1, 0)}
    assert sum(one.end_s - one.start_s for one in gossip) == pytest.approx(
        found.exchanging_s().sum()
    )


def test_the_same_seed_is_the_same_timeline():
    rates = edge_rates(topology("exponential", 8))
    first, again, other = (
        simulate(rates, Workers.uneven(8, jitter=0.1), Network(delay_s=0.2), units=20, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first.exchange_end_s.tolist() == again.exchange_end_s.tolist()
    assert first.exchange_end_s.tolist() != other.exchange_end_s.tolist()


@pytest.mark.parametrize(
    ("act", "fact"),
    [
        (lambda: simulate(PAIR, Workers([1.0] * 2)), "units (inf)"),
        (lambda: simulate(PAIR, Workers([1.0] * 2), units=0), "units (0)"),
        (lambda: simulate({(1, 0): 1.0}, Workers([1.0] * 2), units=1), "edge (1-0)"),
        (lambda: simulate({(0, 2): 1.0}, Workers([1.0] * 2), units=1), "edge (0-2)"),
        (lambda: Workers([1.0, 0.0]), "gradient_s[1] (0)"),
        (lambda: Workers([1.0], jitter=-1), "jitter (-1)"),
        (lambda: Network(nic_bytes_s=0), "nic_bytes_s (0)"),
        (lambda: Network(delay_s={(0, 1): math.nan}), "delay_s (nan)"),
        (lambda: Network(edge_bytes_s={(0, 1): -1}), "edge_bytes_s[(0, 1)] (-1)"),
        (
            lambda: simulate(PAIR, Workers([1.0] * 2), Network(hosts=[0]), units=1),
            "hosts (1 values)",
        ),
        (
            lambda: simulate(PAIR, Workers([1.0] * 2), Network(nic_bytes_s=[1.0]), units=1),
            "nic_bytes_s (1 values)",
        ),
    ],
)
def test_bad_input(act, fact):
    with pytest.raises(ValueError) as caught:
        act()
    assert fact in str(caught.value)
