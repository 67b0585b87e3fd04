"""Closing an accumulation window: what was added up so far is complete."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, rule


@rule(writes=("grad",), role="close", conserves=True, by_bucket=False)
def close(context: Context, apply: Apply) -> None:  # noqa: ARG001
    """The newest gradients become one copy older, and the next ones go to an empty copy."""
    context.rotate("grad")
