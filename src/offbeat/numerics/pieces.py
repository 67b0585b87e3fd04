"""Long arrays a piece at a time, so that every pass over one finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 1 << 16  # elements; whole blocks of every codec


def pieces(size: int) -> Iterator[slice]:
    """Slices that cover so many elements."""
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))
