"""The user's optimizer as a rule."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    reads=("grad", "param", "state"),
    writes=("grad", "param", "state"),
    role="update",
    conserves=True,
    age=Setting("count", 0, least=0),
    scale=Setting("number", 1.0),
    merge=Setting("word", "sum", words=("sum", "mean")),
)
def local(context: Context, apply: Apply) -> None:
    """Step these buckets. Settings: `age` of the gradients; `scale`, a factor on them; `merge`:
    `mean` divides them by the iterations added up."""
    context.local(apply)


@rule(writes=("state",), conserves=True)
def reset(context: Context, apply: Apply) -> None:
    """Begin the optimizer's state of these buckets anew."""
    context.reset(apply.buckets)
