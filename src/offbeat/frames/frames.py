"""Frames: a header of fixed size, JSON (`meta`), and raw numbers (`body`).

The header is validated before memory for meta or body is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

MAGIC, VERSION = b"offb", 1
MOST_META_BYTES = 1 << 20
_HEADER = struct.Struct("!4sBBHIqIQ")
HEADER_BYTES = _HEADER.size

K = TypeVar("K", bound=IntEnum)


class WireError(Exception):
    """A frame with an invalid magic, version, kind, size or meta."""


class Header(NamedTuple, Generic[K]):
    """Header of a frame, before its meta and body."""

    kind: K
    rank: int
    shard: int = 0
    clock: int = 0
    meta_bytes: int = 0
    body_bytes: int = 0


class Frame(NamedTuple, Generic[K]):
    """A complete frame. `body` is the first result of `Room`."""

    header: Header[K]
    meta: dict[str, Any]
    body: Any = None


Steps = Generator[memoryview, None, None]
"""Reads a part of a connection. Yields memory, which the caller fills with the next received bytes.
The caller throws a ConnectionResetError into it if the other end has closed the connection."""

Room = Callable[[Header[K]], tuple[Any, memoryview]]
"""Returns (body object, memory to receive into) for the header of a frame, or raises WireError to
refuse the frame. It is called before a byte of meta or body is read."""


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
    return _HEADER.pack(MAGIC, VERSION, kind, rank, shard, clock, len(text), body_bytes) + text


def read_frames(kinds: type[K], room: Room[K], deliver: Callable[[Frame[K]], object]) -> Steps:
    """Read frames, and deliver each complete one.

    Args:
        kinds: kinds of frames.
        room: see `Room`.
        deliver: called with each frame before the next one is read.

    Raises:
        WireError: the received bytes are no frame of these kinds.
    """
    while True:
        head = bytearray(HEADER_BYTES)
        yield memoryview(head)
        magic, version, kind, rank, shard, clock, meta_bytes, body_bytes = _HEADER.unpack(head)
        if magic != MAGIC:
            raise WireError("the peer does not speak offbeat's protocol")
        if version != VERSION:
            raise WireError(f"version ({version}) must be {VERSION}; run one version of offbeat")
        try:
            kind = kinds(kind)
        except ValueError:
            raise WireError(f"kind ({kind}) is unknown") from None
        if meta_bytes > MOST_META_BYTES or clock < 0:
            raise WireError(f"{kind.name}: meta ({meta_bytes} bytes) or clock ({clock}) cannot be")
        header = Header(kind, rank, shard, clock, meta_bytes, body_bytes)
        body, memory = room(header)
        if len(memory) != body_bytes:
            raise WireError(f"body ({body_bytes} bytes) must have {len(memory)}")
        text = bytearray(meta_bytes)
        yield memoryview(text)
        yield memory
        try:
            meta = {**json.loads(text or b"{}")}
        except (TypeError, ValueError, RecursionError):
            raise WireError("meta must be a JSON object") from None
        deliver(Frame(header, meta, body))
