"""End of an accumulation window."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, rule


@rule(writes=("grad",), role="close", conserves=True, by_bucket=False)
def close(context: Context, apply: Apply) -> None:  # noqa: ARG001
    """Turn the newest copy of the gradients into the previous one, and continue with an empty
    copy."""
    context.rotate("grad")
