"""Rules of meaning that the runtime, the interpreter and the simulator share.

They work on numbers, NumPy arrays and tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from offbeat.core.plan.types import Apply, Transfer


def is_active(
    rule: Transfer | Apply, iteration: int, outcome: Callable[[str, int], object]
) -> bool:
    """Return whether the vote on which a rule depends allows it. It does without a vote, and in the
    first iterations, whose vote would precede the plan.

    Args:
        rule: rule of the plan.
        iteration: number of its iteration in the plan.
        outcome: function of the name of a vote and the number of iterations since it was taken;
            returns its outcome.
    """
    return rule.when is None or iteration < rule.ago or bool(outcome(rule.when, rule.ago))


def is_finite(x: Any) -> bool:
    """Return whether all elements of an array or a tensor are finite. They are tested one by one
    only if their sum is not finite, as it may overflow."""
    return math.isfinite(float(x.sum())) or bool((x - x == 0).all())


def shard_slice(size: int, count: int, index: int, grain: int = 1) -> slice:
    """Return the elements of one of `count` shards of `size` elements, each of equally many grains.
    The last shards are shorter, or empty.

    Args:
        size: number of elements.
        count: number of shards.
        index: number of the shard; an empty one beyond the last.
        grain: elements of a grain.
    """
    each = -(-size // (grain * count)) * grain
    return slice(min(size, index * each), min(size, (index + 1) * each))
