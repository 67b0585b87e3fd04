"""Checks of parameters that describe data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def require_enough(samples: int, workers: int, least: int = 1) -> None:
    """Raise ValueError unless there are `least` samples for each worker."""
    if samples < workers * least:
        raise ValueError(
            f"samples ({samples}) must be at least {workers * least}, {least} for each of "
            f"{workers} workers; give more data or fewer workers"
        )


def relative_sizes(sizes: Sequence[float] | None, workers: int) -> NDArray[np.float64]:
    """Return the sizes as an array, equal sizes for None. Raise ValueError unless there is one per
    worker.
    """
    if sizes is None:
        return np.ones(workers)
    if len(sizes) != workers:
        raise ValueError(
            f"sizes ({len(sizes)} entries) must have one entry per worker ({workers}); "
            "leave sizes out for equal ones"
        )
    return np.asarray(sizes, dtype=np.float64)


def require_sizes(sizes: Sequence[float] | None) -> None:
    """Raise ValueError unless all sizes are finite and above 0."""
    for worker, size in enumerate(sizes or ()):
        require_positive(f"sizes[{worker}]", size, "leave out a worker that shall have no data")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _suffix(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""
