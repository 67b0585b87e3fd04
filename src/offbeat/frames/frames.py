"""Frames of messages over sockets, and a reader that validates them.

A frame is a header of fixed size, JSON (`meta`), and raw numbers (`body`). The header is validated
before memory for meta or body is allocated.
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
    """A frame with an invalid magic, version, kind, size or meta."""


@dataclass(frozen=True, slots=True)
class Header(Generic[K]):
    """Header of a frame, before its meta and body."""

    kind: K
    rank: int
    shard: int = 0
    clock: int = 0
    meta_bytes: int = 0
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frame(Generic[K]):
    """A complete frame. `body` is the first result of `Reader`'s `room`."""

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
    """Return header and meta of a frame as bytes. The caller sends the body after them."""
    text = b"" if meta is None else json.dumps(meta, separators=(",", ":")).encode()
    head = _HEADER.pack(MAGIC, VERSION, kind, rank, shard, clock, len(text), body_bytes)
    return head + text


def unpack(data: Buffer, kinds: type[K]) -> Header[K]:
    """Return the header in `data`. Raise WireError if it is invalid or its kind is not in
    `kinds`."""
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
    """Assembles frames from pieces of any size.

    `room(header)` is called before a byte of meta or body is read. It returns (body object, memory
    to receive into), or raises WireError to refuse the frame.
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
        """Receive once, and return the frame if it is complete.

        Raises:
            ConnectionError: the peer has closed the connection.
            WireError: the frame is invalid. Close the connection, because later bytes cannot be
                assigned to frames.
        """
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
        parsed = json.loads(meta)
    except (ValueError, RecursionError):
        raise WireError("meta is not JSON") from None
    if not isinstance(parsed, dict):
        raise WireError("meta must be an object")
    return parsed
