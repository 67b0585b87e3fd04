"""The arithmetic of mixing against the equations as they are written, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from harness.parts import PIECE, mixing

SIZE = PIECE + 7  # more than one piece


def arrays(kind: str, count: int) -> list[Any]:
    random = np.random.default_rng(3)
    made = [random.standard_normal(SIZE) for _ in range(count)]
    return made if kind == "numpy" else [torch.from_numpy(array.copy()) for array in made]


def numbers(array: Any) -> np.ndarray:
    return torch.as_tensor(array).numpy().copy()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_it_is_what_the_equations_say(kind: str) -> None:
    x, tilde, m, before = arrays(kind, 4)
    x0, y0, m0, b0 = (numbers(a) for a in (x, tilde, m, before))
    eta, dt = 0.3, 1.7
    mixing.mix(x, tilde, eta, dt)
    s, d = (x0 + y0) / 2, (x0 - y0) / 2 * math.exp(-2 * eta * dt)
    np.testing.assert_allclose(numbers(x), s + d, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(numbers(tilde), s - d, rtol=1e-13, atol=1e-14)
    mixing.exchange(x, tilde, m, (0.5, 1.9))
    np.testing.assert_allclose(numbers(x), s + d - 0.5 * m0, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(numbers(tilde), s - d - 1.9 * m0, rtol=1e-13, atol=1e-14)
    tilde[:] = 0.0
    mixing.follow(tilde, m, before)
    np.testing.assert_allclose(numbers(tilde), m0 - b0, rtol=1e-13, atol=1e-14)


def test_mixing_twice_is_mixing_for_the_sum_of_both_times() -> None:
    x, tilde = arrays("numpy", 2)
    y, y_tilde = x.copy(), tilde.copy()
    for dt in (0.4, 0.0, 1.1):
        mixing.mix(x, tilde, 0.2, dt)
    mixing.mix(y, y_tilde, 0.2, 1.5)
    np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(tilde, y_tilde, rtol=1e-12, atol=1e-14)


def test_a_late_exchange_has_the_effect_of_one_at_its_time() -> None:
    x, tilde, m = arrays("numpy", 3)
    y, y_tilde = x.copy(), tilde.copy()
    eta, dt, alphas = 0.25, 2.5, (0.5, 1.3)
    mixing.exchange(x, tilde, m, alphas)
    mixing.mix(x, tilde, eta, dt)
    mixing.mix(y, y_tilde, eta, dt)
    mixing.exchange(y, y_tilde, m, mixing.jump(*alphas, eta, dt))
    np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(tilde, y_tilde, rtol=1e-12, atol=1e-14)


def test_without_momentum_only_x_moves() -> None:
    x, m = arrays("numpy", 2)
    expected = x - 0.5 * m
    mixing.exchange(x, None, m, (0.5, 0.5))
    np.testing.assert_array_equal(x, expected)
