"""Different functions of ranks, which take turns in one world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns."""
    return function(*args)


def in_turn(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What each of several functions returns."""
    return [call(*one) for one in calls]
