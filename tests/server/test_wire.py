"""Frames: read whatever pieces they arrive in, and refused before they are believed."""

from __future__ import annotations

import random
import socket
import struct
from typing import Any

import pytest

from offbeat.frames.connection import NOTHING, Connection
from offbeat.frames.frames import HEADER_BYTES, Frame, Header, Reader, WireError, pack, unpack
from offbeat.server.protocol import Kind


def reader(limit: int = 1 << 16) -> Reader:
    """Accepts every body up to a limit."""

    def room(header: Header) -> tuple[Any, memoryview]:
        if header.body_bytes > limit:
            raise WireError("too large")
        body = bytearray(header.body_bytes)
        return body, memoryview(body)

    return Reader(Kind, room)


def feed(into: Reader, data: bytes, random_: random.Random) -> list[Frame]:
    """All frames of some bytes that arrive in random pieces."""
    found: list[Frame] = []
    at = 0

    def receive(view: memoryview) -> int:
        nonlocal at
        count = min(random_.randint(1, 40), len(view), len(data) - at)
        view[:count] = data[at : at + count]
        at += count
        return count

    while at < len(data):
        frame = into.read(receive)
        if frame is not None:
            found.append(frame)
    return found


def test_frames_survive_any_pieces() -> None:
    choose = random.Random(1)
    sent = []
    for _ in range(50):
        kind = choose.choice(list(Kind))
        meta = choose.choice([{}, {"why": "x" * choose.randint(0, 99)}])
        body = choose.randbytes(choose.choice([0, 1, 7, 200]))
        sent.append((kind, choose.randint(0, 65535), choose.randint(0, 1 << 40), meta, body))
    data = b"".join(
        pack(kind, rank, shard=3, clock=clock, meta=meta or None, body_bytes=len(body)) + body
        for kind, rank, clock, meta, body in sent
    )
    got = [
        (f.header.kind, f.header.rank, f.header.clock, f.meta, bytes(f.body))
        for f in feed(reader(), data, choose)
    ]
    assert got == sent


def test_noise_is_refused_or_awaited_but_never_a_frame() -> None:
    """Random bytes, and frames with random bytes changed: WireError or a frame whose sizes are
    those of its header; nothing else."""
    choose = random.Random(2)
    frame = pack(Kind.PUSH, 1, clock=5, meta={"settings": [{}]}, body_bytes=8) + bytes(8)
    refused = 0
    for _ in range(2000):
        data = bytearray(frame)
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        if choose.random() < 0.2:
            data = bytearray(choose.randbytes(choose.randint(1, 80)))
        try:
            for found in feed(reader(), bytes(data), choose):
                assert len(found.body) == found.header.body_bytes
                assert isinstance(found.meta, dict)
        except WireError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(0, 0, "protocol"), (4, 9, "version"), (5, 99, "kind"), (20, 0xFF, "meta")],
)
def test_header_that_cannot_be(at: int, value: int, words: str) -> None:
    data = bytearray(pack(Kind.PULL, 1, clock=1))
    data[at] = value
    with pytest.raises(WireError, match=words):
        unpack(data, Kind)


def test_sizes_are_judged_before_memory_is_taken() -> None:
    asked: list[int] = []

    def room(header: Header) -> tuple[Any, memoryview]:
        asked.append(header.body_bytes)
        return None, memoryview(b"")

    data = pack(Kind.PUSH, 1, body_bytes=1 << 60)
    with pytest.raises(WireError, match="body"):
        feed(Reader(Kind, room), data, random.Random(3))
    assert asked == [1 << 60]
    assert struct.calcsize("!4sBBHIqIQ") == HEADER_BYTES


class SlowSocket(socket.socket):
    """A socket that sends one byte at a time."""

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        return super().send(data[:1], flags)


def test_connections_prove_the_secret_byte_by_byte() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socks = socket.create_connection(server.getsockname()), server.accept()[0]
    slow = [SlowSocket(fileno=sock.detach()) for sock in socks]
    ends = [
        Connection(sock, Kind, lambda _: (None, NOTHING), b"x", connects=connects)
        for sock, connects in zip(slow, (True, False), strict=True)
    ]
    one, other = ends
    one.send(pack(Kind.BEAT, 3))
    frames: list[Frame[Kind]] = []
    while not frames:
        for end in ends:
            end.flush()
            frames += end.receive()
    assert (frames[0].header.kind, frames[0].header.rank) == (Kind.BEAT, 3)
    assert one.is_proved
    assert other.is_proved
    for end in ends:
        end.close()
