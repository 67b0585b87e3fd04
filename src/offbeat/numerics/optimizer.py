"""The user's optimizer as a rule."""

from __future__ import annotations

from offbeat.numerics.base import Context, Setting, takes
from offbeat.plan import Apply


@takes(
    age=Setting("count", 0, least=0),
    scale=Setting("number", 1.0),
    merge=Setting("word", "sum", words=("sum", "mean")),
)
def local(context: Context, apply: Apply) -> None:
    """Step these buckets. Settings: `age` of the gradients; `scale`, a factor on them; `merge`:
    `mean` divides them by the iterations added up."""
    context.local(apply)


@takes()
def reset(context: Context, apply: Apply) -> None:
    """Begin the optimizer's state of these buckets anew."""
    context.reset(apply.buckets)
