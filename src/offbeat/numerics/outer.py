"""Outer optimizer: SGD with Nesterov momentum on what the average has changed (DiLoCo)."""

from __future__ import annotations

from offbeat.numerics.base import Context, Setting, takes
from offbeat.plan import Apply


@takes(
    rate=Setting("number", 0.7),
    momentum=Setting("number", 0.9),
    anchor=Setting("buffer", "anchor", kind="param"),
    velocity=Setting("buffer", "velocity", kind="param"),
)
def outer(context: Context, apply: Apply) -> None:
    """`d = anchor - w; v = momentum v + d; anchor -= rate (d + momentum v); w = anchor`.

    `w` holds the average of the workers' parameters; `anchor` (which starts as a copy of the
    parameters) and `velocity` name the plan's buffers. Source: Douillard et al., DiLoCo, 2023,
    Algorithm 1, with torch's Nesterov.
    """
    rate, momentum = apply.arg("rate", 0.7), apply.arg("momentum", 0.9)
    anchors = context.write(apply.arg("anchor", "anchor"), apply.buckets)
    velocities = context.write(apply.arg("velocity", "velocity"), apply.buckets)
    for w, anchor, velocity in zip(
        context.write("param", apply.buckets), anchors, velocities, strict=True
    ):
        difference = anchor - w
        velocity *= momentum
        velocity += difference
        difference += momentum * velocity
        anchor -= rate * difference
        w[...] = anchor
