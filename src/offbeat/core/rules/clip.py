"""Clipping: gradients bounded by a norm, of now or of the iteration before."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

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
    """Scale a buffer of these buckets to at most a norm, as `clip_grad_norm_` does: times
    `norm / (length + 1e-6)` if that is below 1."""
    length = context.squared_norm(apply.arg("buffer"), apply.buckets) ** 0.5
    _scale(context, apply, length)


@rule(
    conserves=False,
    by_bucket=False,
    buffer=Setting("buffer", kind="grad"),
    norm=Setting("number", least=0.0),
)
def clip_early(context: Context, apply: Apply) -> None:
    """Scale gradients bucket by bucket while the norm of all is not known: by the norm that all
    had in the iteration before. The first iteration, and one after a norm that is not finite, go
    by that of the buckets so far. To be applied to every bucket in turn, from the output side."""
    run = apply.buckets
    if run.start == 0:
        before: Norms | None = context.recall("norms")
        context.keep("norms", Norms(before.so_far if before is not None else inf))
    norms: Norms = context.recall("norms")
    norms.so_far += context.squared_norm(apply.arg("buffer"), run)
    known = norms.last < inf  # not of nan
    _scale(context, apply, (norms.last if known else norms.so_far) ** 0.5)


@dataclass
class Norms:
    """Squared norms on one worker: of the iteration before (inf: unknown), and so far."""

    last: float
    so_far: float = 0.0


def _scale(context: Context, apply: Apply, length: float) -> None:
    factor = apply.arg("norm") / (length + ROUNDING)
    if factor < 1:
        context.scale(apply.arg("buffer"), apply.buckets, factor)
