"""What gossiping workers say to each other."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from offbeat.frames.frames import WireError
from offbeat.gossip.pairing import Word


class Kind(IntEnum):
    """What a frame says. `clock`: the number of an exchange or of a meeting."""

    HELLO = 1  # meta: layout, life, door, whole (the last exchange with you), known (edges), held
    ASK = 2  # shall we exchange? meta: t, anchored (the exchange that has left anchors here)
    YES = 3  # from now on; meta: t, alpha, alpha_tilde, coded (whether the anchors are the same)
    BUSY = 4  # not now; I shall ask you
    CHUNK = 5  # x of the exchange's time, or its codes; shard: which chunk
    WHOLE = 6  # all chunks have arrived
    BEAT = 7  # I am alive
    VIEW = 8  # meta: known, edges that have changed; held, counts of meetings
    UP = 9  # a sum on its way to the root; shard: chunk; meta: digest, largest
    DOWN = 10  # the result; as UP, and note
    BYE = 11  # I leave
    REFUSED = 12  # meta: why
    TIME = 13  # what is the common time? meta of the answer: now_s
    JOIN = 14  # give me a place; meta: layout, strategy, door, id
    LATER = 15  # no time for that now
    WELCOME = 16  # a place, and as body the state to begin with
    MISSED = 17  # what was the result of this meeting?
    FORGOTTEN = 18  # there is none any more


WORDS = {Kind.ASK: Word.ASK, Kind.YES: Word.YES, Kind.BUSY: Word.BUSY}
KINDS = {word: kind for kind, word in WORDS.items()}


def finite(value: Any) -> float:
    """A number of a frame's meta; WireError if it is none."""
    if not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise WireError(f"{value!r} must be a finite number")
    return float(value)


def agreed(note: Any) -> tuple[float, list[tuple[int, int]] | None]:
    """What the root of an agreement says: when it came about, and new edges if there are any.
    WireError if it is not that."""
    if not isinstance(note, dict):
        raise WireError("an agreement must have a note")
    edges = note.get("edges")
    return finite(note.get("now_s")), None if edges is None else pairs(edges)


def pairs(edges: Any) -> list[tuple[int, int]]:
    """Edges of a frame's meta; WireError if they are none."""
    if not isinstance(edges, list) or not all(_is_pair(edge) for edge in edges):
        raise WireError("edges must be pairs of workers")
    return [(i, j) for i, j in edges]


def _is_pair(edge: Any) -> bool:
    return isinstance(edge, list) and len(edge) == 2 and all(type(end) is int for end in edge)
