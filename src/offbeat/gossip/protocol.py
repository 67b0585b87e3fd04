"""Kinds of frames between gossiping workers, and checks of their metadata."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from offbeat.frames.frames import WireError


class Kind(IntEnum):
    """Kind of a frame. Its header field `clock` holds the number of an exchange or of a tree
    reduction.
    """

    # meta: layout, life, door (address), whole (last complete exchange with the receiver), and all
    # fields of VIEW
    HELLO = 1
    # request of an exchange; meta: t, anchored (exchange that left the anchors of the sender)
    ASK = 2
    YES = 3  # acceptance; meta: t, alpha, alpha_tilde, coded (both workers have the same anchors)
    BUSY = 4  # refusal; the sender requests an exchange later
    CHUNK = 5  # x at the time of the exchange, or its codes; shard: number of the chunk
    WHOLE = 6  # the sender has received all chunks
    BEAT = 7  # heartbeat
    # meta: what is new of known (edges), reports and agreed (`Agreements`); held (reductions)
    VIEW = 8
    UP = 9  # sum on its way to the root; shard: chunk; meta: digest, largest
    DOWN = 10  # result; fields of UP
    BYE = 11  # the sender leaves the job
    REFUSED = 12  # meta: why (the reason)
    TIME = 13  # request of the common time; meta of the answer: now_s
    JOIN = 14  # request to join the job; meta: layout, strategy, door, id
    LATER = 15  # the receiver of JOIN is busy; try again
    WELCOME = 16  # answer to JOIN: a place; the body is the initial state


SIGNALS = (Kind.ASK, Kind.YES, Kind.BUSY)


def finite(value: Any) -> float:
    """Return a number from the metadata of a frame. Raise WireError unless it is finite."""
    if not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise WireError(f"{value!r} must be a finite number")
    return float(value)


def parse_edges(edges: Any) -> list[tuple[int, int]]:
    """Return the edges in the metadata of a frame. Raise WireError unless they are pairs of
    integers.
    """
    if not isinstance(edges, list) or not all(_is_pair(edge) for edge in edges):
        raise WireError("edges must be pairs of workers")
    return [(i, j) for i, j in edges]


def _is_pair(edge: Any) -> bool:
    return (
        isinstance(edge, (list, tuple)) and len(edge) == 2 and all(type(end) is int for end in edge)
    )


def ids_text(workers: Iterable[int]) -> str:
    """Return ids in ascending order, such as '0, 2, 5'."""
    return ", ".join(map(str, sorted(workers)))
