"""Long arrays a piece at a time, so that every pass over one finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PIECE = 1 << 16  # elements; whole blocks of every codec
ON_GPU = 1 << 24  # elements, whole pieces: there a launch costs more than a cache saves


def at_once(x: Any) -> int:
    """Elements of an array or tensor that one pass takes."""
    return PIECE if getattr(x, "is_cpu", True) else ON_GPU


def pieces(x: Any) -> Iterator[slice]:
    """Slices that cover the last dimension of an array or tensor."""
    size, step = x.shape[-1], at_once(x)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
