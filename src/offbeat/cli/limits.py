"""Options that are numbers: what they must be, said with the option, its value and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def whole(_: Any, tokens: Sequence[Any]) -> int:
    """A whole number of an option's text: never a rounded one."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"({text!r}) must be a whole number, as 4") from None


def at_least(option: str, value: int, least: int, remedy: str, most: int | None = None) -> None:
    """ValueError unless a number is within its limits."""
    if least <= value and (most is None or value <= most):
        return
    limits = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{option} ({value}) must be {limits}; {remedy}")


def seconds(option: str, value: float, most_s: float) -> None:
    """ValueError unless a duration is above 0 and finite."""
    if not 0 < value <= most_s:
        raise ValueError(
            f"{option} ({value:g}) must be above 0 and at most {most_s:.0f} s; leave it out for "
            "the default"
        )
