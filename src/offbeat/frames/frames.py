"""Frames: what processes say to each other over sockets, and how they are read without belief.

A frame is a header of fixed size, JSON (`meta`), and raw numbers (`body`). Its sizes are judged by
the header, before anything is put anywhere.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

MAGIC = b"offb"
VERSION = 1
MOST_META_BYTES = 1 << 20
_HEADER = struct.Struct("!4sBBHIqIQ")
HEADER_BYTES = _HEADER.size

Buffer = memoryview | bytearray | bytes
K = TypeVar("K", bound=IntEnum)


class WireError(Exception):
    """A frame that cannot be: of another magic, version, kind, size or form."""


@dataclass(frozen=True, slots=True)
class Header(Generic[K]):
    """What stands before a frame's meta and body."""

    kind: K
    rank: int
    shard: int = 0
    clock: int = 0
    meta_bytes: int = 0
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frame(Generic[K]):
    """A whole frame; `body` is the memory that it was received into."""

    header: Header[K]
    meta: dict[str, Any]
    body: Any = None


def pack(
    kind: IntEnum,
    rank: int,
    *,
    shard: int = 0,
    clock: int = 0,
    meta: dict[str, Any] | None = None,
    body_bytes: int = 0,
) -> bytes:
    """Header and meta of a frame; the body follows."""
    text = b"" if meta is None else json.dumps(meta, separators=(",", ":")).encode()
    head = _HEADER.pack(MAGIC, VERSION, kind, rank, shard, clock, len(text), body_bytes)
    return head + text


def unpack(data: Buffer, kinds: type[K]) -> Header[K]:
    """The header in these bytes, of one of these kinds; WireError if it is none."""
    magic, version, kind, rank, shard, clock, meta_bytes, body_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError("the peer does not speak offbeat's protocol")
    if version != VERSION:
        raise WireError(
            f"version ({version}) must be {VERSION}; run one offbeat version everywhere"
        )
    try:
        kind = kinds(kind)
    except ValueError:
        raise WireError(f"kind ({kind}) is unknown") from None
    if meta_bytes > MOST_META_BYTES or clock < 0:
        raise WireError(f"{kind.name}: meta ({meta_bytes} bytes) or clock ({clock}) cannot be")
    return Header(kind, rank, shard, clock, meta_bytes, body_bytes)


class Reader(Generic[K]):
    """Puts frames together from whatever pieces they arrive in.

    `room(header)` returns where the body goes, as (what the frame gets, its memory), and raises
    WireError for a frame that is not welcome. It is asked before a byte of meta or body is read.
    """

    def __init__(self, kinds: type[K], room: Callable[[Header[K]], tuple[Any, memoryview]]):
        self._kinds, self._room = kinds, room
        self._fixed = bytearray(HEADER_BYTES)
        self._begin()

    def _begin(self) -> None:
        self._header: Header[K] | None = None
        self._meta, self._body = bytearray(), None
        self._left: deque[memoryview] = deque([memoryview(self._fixed)])

    def read(self, receive: Callable[[memoryview], int]) -> Frame[K] | None:
        """Receive once; a frame if that completes it. ConnectionError when the peer has closed,
        WireError for a frame that cannot be: nothing after it may be believed."""
        count = receive(self._left[0])
        if count == 0:
            raise ConnectionResetError("the peer has closed the connection")
        self._left[0] = self._left[0][count:]
        if not len(self._left[0]):
            self._left.popleft()
        if self._left:
            return None
        if self._header is None:
            self._expect(unpack(self._fixed, self._kinds))
            if self._left:
                return None
        return self._complete()

    def _expect(self, header: Header[K]) -> None:
        self._body, memory = self._room(header)
        if len(memory) != header.body_bytes:
            raise WireError(
                f"{header.kind.name}: body ({header.body_bytes} bytes) must have {len(memory)}"
            )
        self._header, self._meta = header, bytearray(header.meta_bytes)
        self._left.extend(view for view in (memoryview(self._meta), memory) if len(view))

    def _complete(self) -> Frame[K]:
        assert self._header is not None
        frame = Frame(self._header, _parse_meta(self._meta), self._body)
        self._begin()
        return frame


def _parse_meta(meta: bytearray) -> dict[str, Any]:
    if not meta:
        return {}
    try:
        found = json.loads(meta)
    except (ValueError, RecursionError):
        raise WireError("meta is not JSON") from None
    if not isinstance(found, dict):
        raise WireError("meta must be an object")
    return found
