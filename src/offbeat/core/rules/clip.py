"""Clipping of gradients by their norm, of this iteration or of the previous one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule

ROUNDING = 1e-6  # as in torch's clip_grad_norm_


@rule(
    conserves=False,
    by_bucket=False,
    buffer=Setting("buffer"),
    norm=Setting("number", least=0.0),
)
def clip(context: Context, apply: Apply) -> None:
    """Scale a buffer of these buckets to at most a norm, as `clip_grad_norm_` does.

    The factor is `norm / (length + 1e-6)` if that is below 1.
    """
    length = float(context.squared_norm(apply.arg("buffer"), apply.buckets)) ** 0.5
    _scale_to_norm(context, apply, length)


@rule(
    conserves=False,
    by_bucket=False,
    buffer=Setting("buffer", kind="grad"),
    norm=Setting("number", least=0.0),
)
def clip_early(context: Context, apply: Apply) -> None:
    """Clip the gradients of one bucket before the norm of all gradients is known.

    The factor uses the norm of all gradients in the previous iteration. In the first iteration, and
    after a norm that is not finite, it uses the norm of the buckets so far. The rule must be
    applied to each bucket in turn, in backward order.
    """
    run = apply.buckets
    if run.start == 0:
        before: Norms | None = context.recall("norms")
        context.keep("norms", Norms(float(before.so_far) if before is not None else inf))
    norms: Norms = context.recall("norms")
    norms.so_far = norms.so_far + context.squared_norm(apply.arg("buffer"), run)
    known = norms.last < inf  # false for nan
    # Only the first iteration waits for the device here.
    _scale_to_norm(context, apply, (norms.last if known else float(norms.so_far)) ** 0.5)


@dataclass
class Norms:
    """Squared norms of the gradients on one worker.

    Attributes:
        last: squared norm of the previous iteration; inf if unknown.
        so_far: squared norm of the buckets so far in this iteration; a number or a tensor with one
            element.
    """

    last: float
    so_far: Any = 0.0


def _scale_to_norm(context: Context, apply: Apply, length: float) -> None:
    factor = apply.arg("norm") / (length + ROUNDING)
    if factor < 1:
        context.scale(apply.arg("buffer"), apply.buckets, factor)
