"""Algorithm 1 of A2CiD2: its lines, and their arithmetic in place for NumPy and torch.

A worker has parameters x, a second copy x~ (`tilde`) and the label t of its last event, which two
threads share (`state.State`). x~ moves further in an exchange, and between events x and x~ approach
each other. Numbers are lines of the paper.

    thread of the training loop:                            `state.State.step`
      6-8     t' = clock(); g = gradient at x
      9       x, x~ = mix(x, x~, eta, t' - t)               `mix`
      10-12   x = x - gamma g; x~ = x~ - gamma g; t = t'    the optimizer's step, then `follow`

    thread of gossip:                                       `exchanging.Exchanging`
      14-15   t' = clock(); find an available worker j      `pairing.Pairing`
      17      x, x~ = mix(x, x~, eta, t' - t)               `mix`, in `state.State.snapshot`
      16      send x to j, receive x of j; m = x - x of j   `exchange.Exchange.difference`
      18-20   x = x - alpha m; x~ = x~ - alpha~ m; t = t'   `exchange`, in `state.State.apply`

Line 17 comes before line 16: with the paper's order (`mixed=False`) workers agree more slowly. Both
workers use one t', the later of their clocks. All operations are linear, so m that arrives dt later
has the effect of m at t', mixed for dt (`jump`). eta, alpha and alpha~ follow from the graph
(`graphs.constants`).

Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, Algorithm 1, with the exchange after the
    mixing. AD-PSGD (Lian et al., ICML 2018) is the case without x~ and with eta = 0.
"""

from __future__ import annotations

import math
from typing import Any

from offbeat.core.codecs.pieces import pieces


def mix(x: Any, tilde: Any, eta: float, dt: float) -> None:
    """Mix x and x~: `s = (x + x~)/2; d = (x - x~)/2 exp(-2 eta dt); x, x~ = s + d, s - d`.

    Args:
        x: parameters, flat.
        tilde: second copy of the parameters, of the same size.
        eta: mixing rate per unit of time.
        dt: units of time, in mean gradient times. A negative `dt` reverts mixing.
    """
    share = -math.expm1(-2 * eta * dt) / 2
    if share == 0:
        return
    for piece in pieces(x):
        one, other = x[piece], tilde[piece]
        moved = (one - other) * share
        one -= moved
        other += moved


def jump(alpha: float, alpha_tilde: float, eta: float, dt: float) -> tuple[float, float]:
    """Return `(a, a~)`, the factors of an exchange `dt` units ago: x loses a m and x~ loses a~ m
    now.
    """
    assert dt >= 0, dt
    half = (alpha - alpha_tilde) / 2 * -math.expm1(-2 * eta * dt)
    return alpha - half, alpha_tilde + half


def exchange(x: Any, tilde: Any | None, m: Any, factors: tuple[float, float]) -> None:
    """Apply an exchange: `x -= a m; x~ -= a~ m`.

    Args:
        x: parameters, flat.
        tilde: second copy of the parameters, or None.
        m: x of this worker minus x of its partner.
        factors: `(a, a~)`, as `jump` returns them.
    """
    a, a_tilde = factors
    for piece in pieces(x):
        one, found = x[piece], m[piece]
        one -= a * found
        if tilde is not None:
            other = tilde[piece]
            other -= a_tilde * found


def follow(tilde: Any, x: Any, before: Any) -> None:
    """Apply a gradient event to x~: `x~ += x - before`, where the optimizer step has changed
    `before` to x.
    """
    for piece in pieces(x):
        other = tilde[piece]
        other += x[piece] - before[piece]
