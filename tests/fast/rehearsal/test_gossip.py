"""Gossip in a rehearsal equals its equations, event by event, on the simulator's timeline."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from cases import rehearsed
from cases.rehearsed import SIZES, K, T, quadratic_profile, rehearse_quadratic
from oracle.quadratic import MOMENTUM, RATE, Quadratic

from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim import Ranks
from offbeat.core.sim.separate_workers import server_of
from offbeat.core.strategy.parsing import parse
from offbeat.gossip.agreement import Agreement
from offbeat.gossip.graphs import topology
from offbeat.gossip.mixing import exchange, follow, jump, mix
from offbeat.gossip.prediction import simulate_strategy
from offbeat.sim import predict

ALIKE = Ranks()
END, BEGIN, APPLY, SNAPSHOT = range(4)  # of events at the same time the first ones come first


def equations(strategy, profile, ranks=ALIKE):
    """Weights that each forward has seen, by worker, and the exchanges of each pair."""
    task = Quadratic(SIZES, K, T)
    start, a, c = task.numbers
    timeline = simulate_strategy(strategy, profile, ranks, gradients=40 * K)
    edges = sorted((min(e), max(e)) for e in topology(strategy.topology, K).edges)
    mixing = Agreement(edges).constants(strategy.rate, momentum=strategy.momentum)
    events, count = [], Counter()
    rows = zip(
        timeline.gradient_worker, timeline.gradient_start_s, timeline.gradient_end_s, strict=True
    )
    for worker, begin_s, end_s in rows:
        if count[worker] < T:
            events += [(begin_s, BEGIN, int(worker), count[worker])]
            events += [(end_s, END, int(worker), count[worker])]
        count[worker] += 1
    for number in range(len(timeline.exchange_edge)):
        events.append((timeline.exchange_start_s[number], SNAPSHOT, number, 0))
        events.append((timeline.exchange_end_s[number], APPLY, number, 0))
    x = np.repeat(start[None], K, axis=0)
    tilde, velocity, label = x.copy(), np.zeros_like(x), np.zeros(K)
    seen, gradient, sent, done = [[] for _ in range(K)], {}, {}, Counter()
    gone: set[int] = set()

    def advance(worker, now):
        if strategy.momentum:
            mix(x[worker], tilde[worker], mixing.eta, max(now - label[worker], 0.0))
        label[worker] = max(now, label[worker])

    for at_s, kind, number, i in sorted(events):
        now = at_s / timeline.unit_s
        if len(gone) == K:
            break
        if kind == BEGIN:
            seen[number].append(x[number].copy())
            gradient[number] = a[number] * (x[number] - c[number, i])
        elif kind == END:
            advance(number, now)
            before = x[number].copy()
            g = gradient[number] + task.decay * x[number]
            velocity[number] = MOMENTUM * velocity[number] + g
            x[number] -= RATE * velocity[number]
            follow(tilde[number], x[number], before)
            if i == T - 1:
                gone.add(number)
        else:
            ends = [int(end) for end in timeline.exchange_edge[number]]
            if kind == SNAPSHOT and not gone & {*ends}:
                for end in ends:
                    advance(end, now)
                sent[number] = now, x[ends[0]] - x[ends[1]]
            elif kind == APPLY and number in sent:
                began, m = sent.pop(number)
                done[tuple(ends)] += 1
                for end, sign in zip(ends, (1, -1), strict=True):
                    factors = jump(mixing.alpha, mixing.alpha_tilde, mixing.eta, label[end] - began)
                    exchange(x[end], tilde[end], sign * m, factors)
    return seen, done


@pytest.mark.parametrize("name", ["a2cid2:topology=complete", "a2cid2:rate=3", "ad-psgd"])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_equals_its_equations(name, jitter):
    curve, seen = rehearse_quadratic(name, jitter=jitter)
    strategy = parse(name)
    expected, done = equations(strategy, extrapolate(quadratic_profile(K), jitter=jitter))
    np.testing.assert_allclose(np.array(seen), np.array(expected), rtol=0, atol=1e-12)
    counted = curve.run.logs[0].notes["gossip"]["exchanges"]
    assert counted == {str(j): n for (i, j), n in done.items() if i == 0}
    assert sum(done.values()) > K


@pytest.mark.parametrize("name", ["a2cid2", "ad-psgd"])
def test_clock_is_the_prediction(name):
    curve, _ = rehearse_quadratic(name)
    expected = predict(parse(name), quadratic_profile(K))
    assert curve.iteration_s == pytest.approx(expected.iteration_s, rel=1e-12)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_codes_lose_little(wire):
    """The exchanges are those of numbers, so the weights stay near those of numbers."""
    _, exact = rehearse_quadratic("a2cid2:rate=3")
    _, coded = rehearse_quadratic(f"a2cid2:rate=3:wire={wire}")
    apart = abs(np.array(coded) - np.array(exact)).max()
    assert 0 < apart < 0.3 * abs(np.array(exact)).max()


def test_consolidate_averages_and_training_goes_on():
    """Workers that wait in a call of the script miss gradients; the others go on meanwhile."""
    averages = []

    def before(model, _rank, iteration):
        if iteration == 4:
            model.consolidate()
            averages.append(rehearsed.flat(model.module))

    curve, seen = rehearse_quadratic("ad-psgd", jitter=0.5, before=before)
    assert len(averages) == K
    for one in averages[1:]:
        np.testing.assert_array_equal(one, averages[0])
    assert [len(rows) for rows in seen] == [T] * K
    assert len(curve.ends_s) == T


def test_exchanges_take_the_slower_direction():
    """With one worker per host, an exchange lasts a request, its answer, and the bytes at the
    smallest rate of both uplinks and both downlinks."""
    profile = quadratic_profile(K)
    strategy = parse("ad-psgd:topology=complete")
    even = server_of(profile, 1)
    up, down = (1.0, 0.5, 2.0), (0.25, 4.0, 4.0)
    ranks = Ranks(link_rates={"net": up}, receive_rates={"net": down})
    timeline = simulate_strategy(strategy, profile, ranks, gradients=40 * K)
    size_bytes = sum(bucket.size_bytes for bucket in profile.buckets)
    assert len(timeline.exchange_edge) > 2 * K
    for (i, j), start_s, end_s in zip(
        timeline.exchange_edge, timeline.exchange_start_s, timeline.exchange_end_s, strict=True
    ):
        rate = even.caps[0] * min(up[i], up[j], down[i], down[j])
        assert end_s - start_s == pytest.approx(2 * even.latency_s + size_bytes / rate, rel=1e-9)
    _, seen = rehearse_quadratic("ad-psgd:topology=complete", differences=ranks)
    expected, _ = equations(strategy, profile, ranks)
    np.testing.assert_allclose(np.array(seen), np.array(expected), rtol=0, atol=1e-12)
    _, others = rehearse_quadratic("ad-psgd:topology=complete")
    assert abs(np.array(others) - np.array(seen)).max() > 1e-6


def test_live_weights_are_refused():
    with pytest.raises(ValueError, match="set weights=snapshot"):
        rehearse_quadratic("a2cid2:weights=live")
