"""Numbers along a timeline: against one large matrix per event, and what must be preserved."""

import numpy as np
import pytest
from oracle.consensus import Course, Quadratic, events, follow, poisson

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


@pytest.mark.parametrize("network", [None, Network(delay_s=0.4)])
def test_equals_one_matrix_per_event(network):
    rates, c = ring(5, 2.0)
    timeline = simulate(rates, Workers([1.0, 1.5, 1.0, 0.5, 1.0]), network, units=12, seed=2)
    x = np.random.default_rng(0).standard_normal((5, 3))
    found = follow(timeline, c, x, readings=7)
    assert len(timeline.exchange_edge) > 30
    np.testing.assert_allclose(found.x, in_one_matrix(timeline, c, x), rtol=1e-10, atol=1e-12)


def test_plain_gossip_of_two_agrees_after_one_exchange():
    rates = {(0, 1): 1.0}
    timeline = simulate(rates, Workers([1.0, 1.0]), units=20)
    found = follow(
        timeline, constants(rates, 2).as_ad_psgd(), [[1.0, 0.0], [3.0, 4.0]], readings=400
    )
    first = timeline.exchange_end_s[0]
    before = found.times < first
    assert before.any()
    assert set(found.distance[before]) == {(1 + 4 + 1 + 4) / 2}
    assert set(found.distance[~before]) == {0.0}
    assert found.x.tolist() == [[2.0, 2.0]] * 2


def test_gradients_alone_are_gradient_descent():
    objective = Quadratic(np.array([0.5, 1.0]), np.array([[1.0, 2.0], [3.0, -2.0]]))
    timeline = simulate({(0, 1): 1e-9}, Workers([1.0, 2.0]), units=4)
    assert timeline.gradients().tolist() == [6, 3]
    c = constants({(0, 1): 1.0}, 2)
    found = follow(timeline, c, np.zeros((2, 2)), objective=objective, learning_rate=0.2)
    left = (1 - 0.2 * objective.curvature) ** np.array([[6], [3]])
    np.testing.assert_allclose(found.x, objective.minima * (1 - left))
    away = found.x - np.array([2.0, 0.0])
    assert found.excess[-1] == pytest.approx((objective.curvature * away**2).sum() / 4)


def test_a_gradient_belongs_to_the_point_at_which_it_began():
    """One exchange while worker 0 computes its first gradient."""
    rates = {(0, 1): 0.5}
    seed = next(
        seed
        for seed in range(100)
        if len(simulate(rates, Workers([1.0, 1.0]), units=1, seed=seed).exchange_edge) == 1
    )
    timeline = simulate(rates, Workers([1.0, 1.0]), units=1, seed=seed)
    objective = Quadratic(np.array([1.0]), np.zeros((2, 1)))
    plain = constants(rates, 2).as_ad_psgd()
    found = follow(timeline, plain, [[4.0], [0.0]], objective=objective, learning_rate=0.5)
    assert found.x.tolist() == [[2.0 - 2.0], [2.0 - 0.0]]


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


def test_the_mean_drifts_where_every_worker_has_its_own_unit():
    rates, c = ring(8)
    workers = Workers.uneven(8)
    timeline = simulate(rates, workers, Network(delay_s=0.3), units=150)
    x = np.random.default_rng(1).standard_normal((8, 4)) + 1
    drift = follow(timeline, c, x, unit_s=workers.gradient_s).drift
    assert drift.max() > 1e-6
    assert drift[-1] < 1e-13  # where all agree, the mean of x is that of x and x~ again


def test_momentum_is_faster_and_before_mixing_in_between():
    rates, c = ring(16)
    timeline = simulate(rates, Workers([1.0] * 16), units=150)
    x = np.random.default_rng(2).standard_normal((16, 8))
    after, before = (
        follow(timeline, c, x, exchange=order).decay(15)
        for order in ("after_mixing", "before_mixing")
    )
    plain = follow(timeline, c.as_ad_psgd(), x).decay(15)
    assert after > before > 1.5 * plain
    assert after > 0.17
    assert plain == pytest.approx(c.lambda2, rel=0.3)


def test_training_comes_near_the_common_minimum():
    rates, c = ring(8)
    timeline = simulate(rates, Workers.uneven(8), units=150)
    objective = Quadratic.random(8, 4, noise=0.0)
    found = follow(timeline, c, np.full((8, 4), 5.0), objective=objective, learning_rate=0.05)
    assert found.excess[-1] < found.excess[0] / 50
    assert found.times[-1] == pytest.approx(150)


def test_decay_of_a_known_course():
    times = np.linspace(0, 100, 50)
    flat = np.zeros(50)
    course = Course(times, 3 * np.exp(-0.7 * times), flat, flat, flat)  # ends in rounding
    assert course.decay() == pytest.approx(0.7)
    with pytest.raises(ValueError, match=r"begin \(99\)"):
        course.decay(99)


def test_bad_shape():
    rates, c = ring(4)
    with pytest.raises(ValueError, match=r"x \(shape \(3, 2\)\)"):
        follow(simulate(rates, Workers([1.0] * 4), units=1), c, np.zeros((3, 2)))


def test_exchanges_that_take_no_time_are_those_of_exponential_clocks():
    """Half of an edge's rate is requested at each end, so the edge has an exponential clock,
    whatever the jitter of gradients. Exchanges that take time happen less often, and agreement is
    slower."""
    rates, c = ring(8)
    units, jittery = 60, Workers([1.0] * 8, jitter=0.3)
    kinds = {"clock": [], "no time": [], "takes time": []}
    for seed in range(24):
        x = np.random.default_rng(seed).standard_normal((8, 16))
        network = Network(delay_s=0.4)
        for kind, timeline in zip(
            kinds,
            (
                poisson(rates, 8, units, seed=seed),
                simulate(rates, jittery, units=units, seed=seed),
                simulate(rates, jittery, network, units=units, seed=seed),
            ),
            strict=True,
        ):
            course = follow(timeline, c, x, readings=60)
            kinds[kind].append((len(timeline.exchange_edge), course.decay(units / 10)))
    counts, decays = np.array([kinds[kind] for kind in kinds]).transpose(2, 0, 1)
    expected = sum(rates.values()) * units
    error = (expected / counts.shape[1]) ** 0.5
    assert abs(counts[:2].mean(axis=1) - expected).max() < 3 * error
    assert counts[2].mean() < expected - 3 * error
    errors = decays.std(axis=1, ddof=1) / decays.shape[1] ** 0.5
    assert abs(decays[0].mean() - decays[1].mean()) < 3 * np.hypot(*errors[:2])
    assert decays[2].mean() < decays[1].mean()
