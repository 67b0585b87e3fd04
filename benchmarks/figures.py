"""Figures of several runs as text, as all benchmarks print them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median


def spread(
    values: Sequence[float],
    digits: int = 2,
    middle: Callable[[Sequence[float]], float] = median,
) -> str:
    """Return '12.1 [10.7, 22.2]': the middle, and the least and the greatest of several values."""
    text = f"{middle(values):.{digits}f}"
    if len(values) > 1:
        text += f" [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    return text
