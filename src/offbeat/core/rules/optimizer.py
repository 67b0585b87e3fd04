"""Rules of the user's optimizer and of the windows of gradients that it steps on."""

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
    """Step the user's optimizer for these buckets.

    The setting `age` selects the copy of the gradients. `scale` multiplies the gradients. With
    `merge` "mean", they are divided by the number of iterations that were added up.
    """
    context.local(apply)


@rule(writes=("state",), conserves=True)
def reset(context: Context, apply: Apply) -> None:
    """Reset the optimizer's state of these buckets to its initial values."""
    context.reset(apply.buckets)


@rule(writes=("grad",), role="close", conserves=True, by_bucket=False)
def close(context: Context, apply: Apply) -> None:  # noqa: ARG001
    """Turn the newest copy of the gradients into the previous one, and continue with an empty
    copy."""
    context.rotate("grad")
