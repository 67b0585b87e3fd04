"""Clipping bucket by bucket, where the norm of all is that of the iteration before."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest

from offbeat.core.rules.clip import clip, clip_early
from offbeat.plan import Apply, Moment, Phases


def test_after_a_norm_that_is_not_finite_as_in_the_first_iteration() -> None:
    """By the buckets so far; a NaN that was one iteration long is not clipped for ever."""
    kept: dict[str, Any] = {}
    context = Mock(recall=kept.get, keep=kept.__setitem__)
    apply = [
        Apply("clip_early", range(b, b + 1), Moment("grad"), Phases((0,)), args={"norm": 1.0})  # type: ignore[arg-type]
        for b in range(2)
    ]
    factors = []
    for iteration in ([9.0, 16.0], [math.nan, 16.0], [9.0, 16.0], [math.inf, 0.0], [9.0, 16.0]):
        for b, squared in enumerate(iteration):
            context.reset_mock()
            context.squared_norm.return_value = squared
            clip_early(context, apply[b])
            factors.append(context.scale.call_args.args[2])
    first, later = (1 / 3, 1 / 5), (1 / 5, 1 / 5)
    assert factors == pytest.approx([*first, *later, *first, *later, *first], rel=1e-6)


@pytest.mark.parametrize("rule", [clip, clip_early])
def test_gradients_within_the_norm_stay_as_they_are(rule: Any) -> None:
    """None is made longer."""
    kept: dict[str, Any] = {}
    context = Mock(recall=kept.get, keep=kept.__setitem__)
    args = {"buffer": "grad", "norm": 1.0}
    apply = Apply(rule.__name__, range(1), Moment("grad"), Phases((0,)), args=args)  # type: ignore[arg-type]
    context.squared_norm.return_value = 0.25
    rule(context, apply)
    context.scale.assert_not_called()
    kept.clear()
    context.squared_norm.return_value = 4.0
    rule(context, apply)
    context.scale.assert_called_once_with("grad", range(1), pytest.approx(0.5, rel=1e-5))
