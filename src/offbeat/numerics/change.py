"""A vote on how much the gradient has changed (SelSync)."""

from __future__ import annotations

from offbeat.numerics.base import Context, Setting, takes
from offbeat.plan import Vote


@takes(threshold=Setting("number", least=0))
def changed(context: Context, vote: Vote, buckets: range) -> bool:
    """Whether the squared norm of the gradients differs from the last one's by at least the share
    `threshold`. Yes without a last one, or with one that is zero or not finite."""
    norm = context.squared_norm("grad", buckets)
    last = context.recall(vote.name)
    context.keep(vote.name, norm)
    if last is None or not 0 < last < float("inf"):
        return True
    return not abs(norm - last) / last < vote.arg("threshold")
