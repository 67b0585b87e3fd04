"""Rounds in which ranks are measured in pairs, each rank in one pair at a time."""

from __future__ import annotations

from collections.abc import Iterator


def partners(rank: int, size: int) -> Iterator[int | None]:
    """Yield the partner of a rank in each round of a round-robin tournament; None in a round
    without one.
    """
    seats = size + size % 2
    for turn in range(seats - 1):
        if rank == seats - 1:
            found = turn * (seats // 2) % (seats - 1)
        else:
            found = (turn - rank) % (seats - 1)
            found = seats - 1 if found == rank else found
        yield None if found >= size else found
