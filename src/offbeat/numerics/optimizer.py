"""The user's optimizer as a rule."""

from __future__ import annotations

from offbeat.numerics.base import Context
from offbeat.plan import Apply


def local(context: Context, apply: Apply) -> None:
    """Step these buckets. Settings: `age` of the gradients; `scale`, a factor on them; `merge`:
    `mean` divides them by the iterations added up."""
    context.local(apply)


def reset(context: Context, apply: Apply) -> None:
    """Begin the optimizer's state of these buckets anew."""
    context.reset(apply.buckets)
