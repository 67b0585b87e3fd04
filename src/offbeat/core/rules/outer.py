"""Outer optimizer: SGD with momentum on the change of the average (DiLoCo)."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    conserves=False,
    rate=Setting("number", 0.7),
    momentum=Setting("number", 0.9),
    nesterov=Setting("count", 1, least=0, most=1),
    buffer=Setting("buffer", "param", kind="param"),
    anchor=Setting("buffer", "anchor", kind="param", common=True),
    velocity=Setting("buffer", "velocity", kind="param", common=True),
)
def outer(context: Context, apply: Apply) -> None:
    """Compute `d = anchor - w; v = momentum v + d; w = anchor - rate (d + momentum v); anchor = w`.

    Without `nesterov`, `w = anchor - rate v`. The setting `buffer` names the parameters or a copy
    of them, which holds the average w of the workers. `anchor` (which starts as a copy of the
    parameters) and `velocity` name further buffers. Running statistics keep their average, because
    a step beyond it could make a variance negative.

    Source: Douillard et al., DiLoCo, 2023, Algorithm 1, with Nesterov momentum as in torch.
    """
    rate, momentum = apply.arg("rate", 0.7), apply.arg("momentum", 0.9)
    target, anchor_name = apply.arg("buffer", "param"), apply.arg("anchor", "anchor")
    names = (target, anchor_name, apply.arg("velocity", "velocity"))
    columns = [context.parameters(name, apply.buckets) for name in names]
    for w, anchor, velocity in zip(*columns, strict=True):
        step = anchor - w
        velocity *= momentum
        velocity += step
        if apply.arg("nesterov", 1):
            step += momentum * velocity
        else:
            step[...] = velocity
        w[...] = anchor
        w -= rate * step
    anchors = context.write(anchor_name, apply.buckets)
    for anchor, w in zip(anchors, context.read(target, apply.buckets), strict=True):
        anchor[...] = w
