"""Pieces of long arrays, small enough that repeated passes over a piece hit the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PIECE = 1 << 16  # elements of a piece; a multiple of every codec's block
CUT = 16 * PIECE  # most numbers of a message that the host encodes at a time: 4 MB of float32
ON_GPU = 1 << 24  # elements per pass on a GPU, where a kernel launch costs more than a cache saves


def elements_per_pass(x: Any) -> int:
    """Return the number of elements that one pass over an array or tensor processes."""
    return PIECE if getattr(x, "is_cpu", True) else ON_GPU


def pieces(x: Any) -> Iterator[slice]:
    """Yield slices that cover the last dimension of an array or tensor, one per pass."""
    size, step = x.shape[-1], elements_per_pass(x)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
