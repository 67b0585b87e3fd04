"""Outer optimizer: SGD with Nesterov momentum on what the average has changed (DiLoCo)."""

from __future__ import annotations

from offbeat.numerics.base import Context
from offbeat.plan import Apply


def outer(context: Context, apply: Apply) -> None:
    """`d = anchor - w; v = momentum v + d; anchor -= rate (d + momentum v); w = anchor`.

    `w` holds the average of the workers' parameters; the buffers anchor and velocity are the
    plan's. Source: Douillard et al., DiLoCo, 2023, Algorithm 1, with torch's Nesterov.
    """
    rate, momentum = apply.arg("rate", 0.7), apply.arg("momentum", 0.9)
    anchors = context.write("anchor", apply.buckets)
    velocities = context.write("velocity", apply.buckets)
    for w, anchor, velocity in zip(
        context.write("param", apply.buckets), anchors, velocities, strict=True
    ):
        difference = anchor - w
        velocity *= momentum
        velocity += difference
        difference += momentum * velocity
        anchor -= rate * difference
        w[...] = anchor
