"""Checks of numeric options. Errors name the option, its value, its limits and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def parse_whole_number(_: Any, tokens: Sequence[Any]) -> int:
    """Return an option's text as a whole number. Raise ValueError instead of rounding."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"({text!r}) must be a whole number, as 4") from None


def require_range(
    option: str, value: int, least: int, remedy: str, most: int | None = None
) -> None:
    """Raise ValueError unless an option's value is from `least` to `most`."""
    if least <= value and (most is None or value <= most):
        return
    limits = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{option} ({value}) must be {limits}; {remedy}")


def require_duration(option: str, value: float, most_s: float) -> None:
    """Raise ValueError unless an option's duration is above 0 and at most `most_s` seconds."""
    if not 0 < value <= most_s:
        raise ValueError(
            f"{option} ({value:g}) must be above 0 and at most {most_s:.0f} s; leave it out for "
            "the default"
        )
