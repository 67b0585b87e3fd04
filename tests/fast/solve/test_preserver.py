"""The Preserver's model of the loss against simulation and the paper; the watch on the real one."""

import math
from itertools import pairwise

import numpy as np
import pytest

from offbeat.profile import GradientNoise
from offbeat.strategies import loss_watch
from offbeat.strategies.solvers import preserver

WALKS = 400_000
SINGLE_STEPS = [0.2103, 0.2054, 0.1989, 0.1967, 0.1922]  # DeFT, Table V, row O_B


@pytest.mark.parametrize("target", [0.0, 0.5])
@pytest.mark.parametrize(
    ("above", "eta", "mu", "sigma", "batch"),
    [(1.0, 0.1, 2.0, 3.0, 4), (0.1, 0.1, 1.0, 20.0, 16), (0.05, 0.2, 3.0, 1.0, 1)],
    ids=["far", "at the target", "beyond it"],
)
def test_expectation_is_that_of_the_rebounding_walk(above, eta, mu, sigma, batch, target):
    rng = np.random.default_rng(0)
    moved = target + above - eta * rng.normal(mu, sigma / math.sqrt(batch), WALKS)
    walked = np.where(moved >= target, moved, 2 * target - moved)
    error = walked.std() / math.sqrt(WALKS)
    walk = preserver.LossWalk(target + above, eta, sigma, batch, target)
    expected = walk.expected_loss([1], [mu])
    assert expected == pytest.approx(walked.mean(), abs=5 * error)


def test_without_noise_the_step_is_certain():
    assert preserver.LossWalk(1.0, 0.1, 0.0).expected_loss([1], [3.0]) == pytest.approx(0.7)
    assert preserver.LossWalk(0.2, 0.1, 0.0).expected_loss([1], [3.0]) == pytest.approx(0.1)
    nearly = preserver.LossWalk(0.2, 0.1, 1e-9).expected_loss([1], [3.0])
    assert nearly == pytest.approx(0.1)


def test_table_v():
    eta = 0.01
    mu = [(before - after) / eta for before, after in pairwise(SINGLE_STEPS)]
    walk = preserver.LossWalk(SINGLE_STEPS[0], eta, 0.0)
    assert walk.expected_loss([1, 1, 1, 1], mu) == pytest.approx(SINGLE_STEPS[-1])
    assert walk.ratio([2, 1, 1], mu) == pytest.approx(0.993, abs=0.003)


def test_scales():
    """Under sum a merged step is as long as its iterations together, under mean as one."""
    mu = [1.0, 50.0]
    assert preserver.LossWalk(1.0, 0.1, 0.0).expected_loss([2], mu) == pytest.approx(0.8)
    assert preserver.LossWalk(1.0, 0.1, 0.0, scale="mean").expected_loss([2], mu) == pytest.approx(
        0.9
    )
    one = preserver.LossWalk(0.1, 0.1, 2.0, batch=8).expected_loss([1], [1.0])
    assert preserver.LossWalk(0.1, 0.1, 2.0, batch=4, scale="mean").expected_loss([2], mu) == one
    assert preserver.LossWalk(1.0, 0.1, 2.0).ratio([1, 1], mu) == 1.0
    # 0.1 over nothing
    assert preserver.LossWalk(0.2, 0.1, 0.0).ratio([2], [1.0, 2.0]) == math.inf


def test_lateness_is_counted_in_samples():
    """Both have seen three iterations; one of them has not used the last."""
    walk = preserver.LossWalk(1.0, 0.1, 0.0)
    assert walk.ratio([1, 1], [1.0] * 3, late=1) == pytest.approx(0.7 / 0.8)
    assert walk.ratio([2], [1.0] * 4, late=2) == pytest.approx(0.6 / 0.8)
    assert walk.ratio([2], [1.0] * 2) == 1.0


def test_the_worst_ratio_of_a_cycle():
    """After [2] three iterations wait, after [2, 3] two."""
    walk = preserver.LossWalk(1.0, 0.1, 0.0)
    assert walk.worst_ratio([2, 3], 1.0) == pytest.approx(0.3 / 0.5)  # (1 - .7) / (1 - .5)
    assert walk.worst_ratio([2], 1.0) == pytest.approx(0.6 / 0.8)
    assert preserver.LossWalk(1.0, 0.0, 1.0).worst_ratio([2], 1.0) == 1.0


def test_the_watch_is_silent_while_the_loss_goes_down_or_is_noisy():
    watch = loss_watch.LossWatch()
    rng = np.random.default_rng(1)
    for window in range(200):
        level = 1.0 + math.exp(-window / 20)
        assert watch.add_window(list(rng.normal(level, 0.5, 50))) is None


def test_the_watch_wants_two_windows_in_a_row():
    watch = loss_watch.LossWatch()
    means = [1.0, 1.05, 1.2, 1.0, 1.2]
    assert [watch.add_window([mean] * 4) for mean in means] == [None] * 5
    assert "1.3" in (watch.add_window([1.3] * 4) or "")
    assert watch.add_window([1.0] * 4) is None


def test_the_watch_measures_a_rise_by_the_fall_before():
    """So the noise of a loss near 0 says nothing, and a tenth of what was gained a lot."""
    watch = loss_watch.LossWatch()
    rng = np.random.default_rng(2)
    watch.add_window([2.0] * 10)
    for _ in range(1000):
        assert watch.add_window(list(rng.exponential(0.02, 10))) is None
    rises = [watch.add_window([0.19] * 10), watch.add_window([0.19] * 10)]
    assert rises == [None, None]
    rises = [watch.add_window([0.3] * 10), watch.add_window([0.3] * 10)]
    assert rises[0] is None
    assert rises[1] is not None


def noise(gradient_sq, noise_sq=0.0, step_size=0.1):
    return GradientNoise(1.0, gradient_sq, noise_sq, step_size)


def watched(levels, estimate, deviation=0.0, seed=0):
    """What the watch says at each estimate of 60 iterations around these levels."""
    watch, rng = loss_watch.LossWatch(tolerance=math.inf), np.random.default_rng(seed)
    said = []
    for start, end in pairwise(levels):
        for level in np.linspace(start, end, 6, endpoint=False):
            assert watch.add_window(list(rng.normal(level, deviation, 10))) is None
        said.append(watch.add_estimate(estimate))
    return said


def test_the_watch_sees_a_loss_that_stalls():
    """The gradients predict a fall of 1.2 in 60 iterations."""
    strong = noise(0.2)
    first, *later = watched([2.0] * 4, strong)
    assert first is None  # once may be chance
    assert all(later)
    assert "1.2" in later[0]
    assert watched([2.0, 1.8, 1.6, 1.4], strong) == [None] * 3  # a sixth of the prediction
    assert watched([2.0, 2.0, 1.8, 1.8, 1.6], strong) == [None] * 4  # never twice in a row


def test_the_watch_grants_a_fall_that_noise_may_hide():
    assert watched([2.0] * 4, noise(0.01), deviation=0.5) == [None] * 3
    assert watched([2.0] * 4, noise(0.2), deviation=0.02)[-1] is not None


def test_the_watch_is_silent_on_a_plateau():
    """SGD that has come as far as its step size lets it: the gradient is smaller than its noise."""
    rng = np.random.default_rng(3)
    curvature, deviation, eta = np.array([1.0, 0.3, 0.05]), 1.0, 0.5
    watch, w = loss_watch.LossWatch(tolerance=math.inf), np.full(3, 3.0)
    for _ in range(100):
        squares = 0.0
        for _ in range(6):
            losses = []
            for _ in range(10):
                losses.append(0.5 * float(curvature @ w**2))
                squares += float(((curvature * w) ** 2).sum()) / 60
                w = w - eta * (curvature * w + rng.normal(0.0, deviation, 3))
            assert watch.add_window(losses) is None
        assert watch.add_estimate(noise(squares, 3 * deviation**2, eta)) is None
    assert squares > 0.1  # a fall of 3 in 60 iterations, if noise were nothing


def test_the_watch_sees_losses_that_are_not_finite_at_once():
    watch = loss_watch.LossWatch()
    assert watch.add_window([1.0, math.nan]) is not None
    assert watch.add_window([math.inf]) is not None
    assert watch.add_window([5.0]) is None  # the first that counts


def test_two_walks_that_have_rebounded_are_not_taken_for_alike():
    """One update per 273 iterations, far too long a step: by chance it ends where 546 end."""
    walk = preserver.LossWalk(1.0, 2.04 / 273, 0.0)
    end = walk.expected_loss([1] * 546, [1.0] * 546) - walk.expected_loss([273], [1.0] * 273)
    assert abs(end) < 1.05
    assert abs(walk.worst_ratio([273], 1.0) - 1) > 0.01
    assert abs(walk.worst_ratio([4], 1.0) - 1) > 0.01


def test_the_watch_allows_for_the_windows_own_noise():
    watch = loss_watch.LossWatch()
    watch.add_window([1.0, 1.0])
    assert [watch.add_window([0.2, 2.4]) for _ in range(3)] == [None] * 3  # mean 1.3, error 1.1
