"""Input checks of the solvers. Every error names the parameter, its value and the remedy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def numbers(name: str, values: Sequence[float]) -> Numbers:
    """Return `values` as an array; raise ValueError unless each is finite and at least 0."""
    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"{name}[{i}] ({array[i]:g}) must be finite and at least 0; measure it again"
        )
    return array


def number(name: str, value: float) -> float:
    """Return `value`; raise ValueError unless it is finite and at least 0."""
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"{name} ({value:g}) must be finite and at least 0; measure it again")
    return value


def same_length(name: str, values: Numbers, other_name: str, others: Numbers) -> None:
    """Raise ValueError unless both arrays have the same length."""
    if len(values) != len(others):
        raise ValueError(
            f"{name} ({len(values)} values) must be as long as {other_name} "
            f"({len(others)} values); give one value per bucket"
        )


def period(value: int) -> None:
    """Raise ValueError unless the period has at least one iteration."""
    if value < 1:
        raise ValueError(
            f"period ({value}) must be at least 1; use BSP() to synchronize in every iteration"
        )


def ready(values: Sequence[float]) -> Numbers:
    """Return ready times as an array; raise ValueError unless they are non-decreasing."""
    array = numbers("ready_s", values)
    late = np.flatnonzero(np.diff(array) < 0)
    if late.size:
        i = int(late[0]) + 1
        raise ValueError(
            f"ready_s[{i}] ({array[i]:g}) must be at least ready_s[{i - 1}] ({array[i - 1]:g}); "
            "list the buckets in backward order"
        )
    return array
