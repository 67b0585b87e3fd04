"""Mixing: what A2CiD2 does to a worker's flat arrays, in place; NumPy and torch alike.

A worker has parameters x and a second copy of them, x~ (`tilde`), which gossip moves further.
Between two events they approach each other. Everything is linear, so an exchange that is known late
has the effect that it would have had at its time, moved on to now (`jump`).

Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, Algorithm 1, with the exchange after the
mixing. AD-PSGD (Lian et al., ICML 2018) is the same without x~ and with eta = 0.
"""

from __future__ import annotations

import math
from typing import Any

from offbeat.core.codecs.pieces import pieces


def mix(x: Any, tilde: Any, eta: float, dt: float) -> None:
    """`s = (x + x~)/2; d = (x - x~)/2 exp(-2 eta dt); x, x~ = s + d, s - d`. `dt` is in units of
    a gradient's time; if negative, so much mixing is taken back."""
    share = -math.expm1(-2 * eta * dt) / 2
    if share == 0:
        return
    for piece in pieces(x):
        one, other = x[piece], tilde[piece]
        moved = (one - other) * share
        one -= moved
        other += moved


def jump(alpha: float, alpha_tilde: float, eta: float, dt: float) -> tuple[float, float]:
    """`(a, a~)`: of an exchange of `dt` ago, x and x~ lose a m and a~ m now."""
    assert dt >= 0, dt
    half = (alpha - alpha_tilde) / 2 * -math.expm1(-2 * eta * dt)
    return alpha - half, alpha_tilde + half


def exchange(x: Any, tilde: Any | None, m: Any, factors: tuple[float, float]) -> None:
    """`x -= a m; x~ -= a~ m` with what the exchange found, m = x - x of the partner; without x~
    only the first."""
    a, a_tilde = factors
    for piece in pieces(x):
        one, found = x[piece], m[piece]
        one -= a * found
        if tilde is not None:
            other = tilde[piece]
            other -= a_tilde * found


def follow(tilde: Any, x: Any, before: Any) -> None:
    """A gradient event on x~, after the optimizer has made x of `before`: `x~ += x - before`."""
    for piece in pieces(x):
        other = tilde[piece]
        other += x[piece] - before[piece]
