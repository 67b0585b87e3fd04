"""Checks of parameters that describe data."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def require_count(name: str, value: Any, *, least: int = 1, remedy: str = "") -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(
            f"{name} ({value!r}) must be an integer of at least {least}{_suffix(remedy)}"
        )


def require_fraction(name: str, value: Any, remedy: str = "") -> None:
    """Raise ValueError unless `value` is a number from 0 to 1."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} ({value!r}) must be from 0 to 1{_suffix(remedy)}")


def require_positive(name: str, value: Any, remedy: str = "") -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not (_is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} ({value!r}) must be a finite number above 0{_suffix(remedy)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _suffix(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""
