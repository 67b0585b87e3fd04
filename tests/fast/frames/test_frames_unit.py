"""Connections over real sockets: proofs, frames in pieces, limits, slow and closed peers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offbeat.frames.connection import Connection, ConnectionLoop, prove
from offbeat.frames.frames import HEADER_BYTES, MOST_META_BYTES, Frame, Header, WireError, pack
from offbeat.frames.secret import ANSWER_BYTES, NONCE_BYTES, ProofError, answer, proof
from offbeat.membership.protocol import Kind

SECRET, LIMIT_S, WHOLE = b"secret", 20.0, socket.MSG_WAITALL


def room(header: Header[Kind]) -> tuple[Any, memoryview]:
    body = bytearray(header.body_bytes if header.body_bytes <= 1 << 16 else 0)
    return body, memoryview(body)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection; the first one has opened it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), LIMIT_S)
        other, _ = server.accept()
    with one, other:
        other.settimeout(LIMIT_S)
        yield one, other


def make(sock: socket.socket, secret: Any = SECRET, *, connects: bool = False) -> Connection[Kind]:
    return Connection(sock, Kind, room, secret, connects=connects)


@contextmanager
def inside() -> Iterator[tuple[Connection[Kind], Connection[Kind]]]:
    """Both ends of a connection after the proof; the socket of the second one is blocking."""
    with pair() as socks:
        peer, connection = make(socks[0], connects=True), make(socks[1])
        while not (peer.is_proved and connection.is_proved):
            for end in (connection, peer):
                end.flush()
                assert [*end.receive()] == []
        peer.sock.settimeout(LIMIT_S)
        yield connection, peer


def test_ends_with_one_secret_exchange_frames() -> None:
    with inside() as (one, other):
        other.send(pack(Kind.REQUEST, 3, clock=5, meta={"a": 1}, body_bytes=4), memoryview(b"body"))
        assert one.await_frame(LIMIT_S) == (Header(Kind.REQUEST, 3, 0, 5, 7, 4), {"a": 1}, b"body")
        one.send(pack(Kind.REPLY, 0, shard=2))
        assert other.await_frame(LIMIT_S) == (Header(Kind.REPLY, 0, 2), {}, b"")
        assert (one.bytes_sent, other.bytes_sent) == (HEADER_BYTES, HEADER_BYTES + 11)


@pytest.mark.parametrize("spoilt", [0, 31, 32, 63])
def test_a_worker_must_prove_the_secret(spoilt: int) -> None:
    with pair() as (peer, sock):
        connection = make(sock)
        connection.flush()
        data = bytearray(answer(SECRET, peer.recv(NONCE_BYTES, WHOLE), bytes(NONCE_BYTES)))
        data[spoilt] ^= 1
        peer.sendall(data + pack(Kind.REQUEST, 0))
        with pytest.raises(ProofError):
            connection.await_frame(LIMIT_S)
        sock.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b""  # neither a proof nor a reason


@pytest.mark.parametrize("wrong", [(b"other", b"server"), (SECRET, b"worker"), None])
def test_a_server_must_prove_the_secret(wrong: Any) -> None:
    """With another secret, in the role of a worker, and not at all."""
    with pair() as (sock, peer):
        connection = make(sock, connects=True)
        connection.send(pack(Kind.REQUEST, 0))
        peer.sendall(bytes(NONCE_BYTES))
        with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
            connection.await_frame(0.1)
        given = peer.recv(100)
        assert len(given) == ANSWER_BYTES  # and no frame
        nonces = given[:NONCE_BYTES], bytes(NONCE_BYTES)
        peer.sendall(b"" if wrong is None else proof(*wrong, *nonces))
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ProofError):
            connection.await_frame(LIMIT_S)


def test_a_blocking_proof_has_a_deadline() -> None:
    with pair() as (one, _), pytest.raises(TimeoutError):
        prove(one, SECRET, connects=True, until_s=time.monotonic() + 0.05)


def test_frames_in_any_pieces_arrive_whole() -> None:
    choose, found = random.Random(1), list[Frame[Kind]]()
    data = b"".join(
        pack(Kind.REQUEST, n, meta={"n": n}, body_bytes=n) + bytes(n) for n in range(60)
    )
    with inside() as (connection, peer):
        while data or len(found) < 60:
            data = data[peer.sock.send(data[: choose.randint(1, 40)]) :]
            found += connection.receive()
    assert [(f.meta["n"], len(f.body)) for f in found] == [(n, n) for n in range(60)]


GOOD = pack(Kind.REQUEST, 1, meta={"a": 1}, body_bytes=8)
BAD = {
    "magic": b"x" + GOOD[1:],
    "version": GOOD[:4] + b"\x09" + GOOD[5:],
    "kind": GOOD[:5] + b"\x63" + GOOD[6:],
    "clock": GOOD[:12] + b"\xff" + GOOD[13:],
    "meta": GOOD[:20] + (MOST_META_BYTES + 1).to_bytes(4, "big") + GOOD[24:],
    "large body": pack(Kind.REQUEST, 1, body_bytes=1 << 60),
    "JSON": GOOD[:-1] + b"]" + bytes(8),
    "object": pack(Kind.REQUEST, 1, meta=[1]),  # type: ignore[arg-type]
}


TORN = {str(size): (GOOD + bytes(8))[:size] for size in (0, 1, HEADER_BYTES, len(GOOD) + 7)}


@pytest.mark.parametrize("what", {**BAD, **TORN})
def test_a_frame_that_cannot_be_and_half_a_frame_are_no_frames(what: str) -> None:
    with inside() as (connection, peer):
        peer.sock.sendall({**BAD, **TORN}[what])
        peer.close()
        with pytest.raises(WireError if what in BAD else ConnectionError):
            connection.await_frame(LIMIT_S)


def test_frames_to_a_slow_peer_are_made_one_by_one_and_the_last_one_arrives() -> None:
    made, received, size = list[int](), bytearray(), 1 << 24

    def later(number: int) -> list[memoryview]:
        made.append(number)
        return [memoryview(pack(Kind.REQUEST, number, body_bytes=size)), memoryview(bytes(size))]

    with inside() as (connection, peer):
        for number in range(3):
            connection.send_later(lambda number=number: later(number))
        connection.end(pack(Kind.REPLY, 7))
        assert made == [0]
        while part := peer.sock.recv(1 << 20):
            received += part
            peer.sock.sendall(b"discarded")
            connection.flush()
            assert [*connection.receive()] == []
        assert (made, len(received)) == ([0, 1, 2], 3 * (HEADER_BYTES + size) + HEADER_BYTES)
        assert received.endswith(pack(Kind.REPLY, 7))


class Echo(ConnectionLoop[Any]):
    is_stopped = False

    def run(self) -> None:
        while not self.is_stopped:
            self._process_sockets(LIMIT_S)
        self.close()

    def _on_accept(self, sock: socket.socket) -> None:
        self._add_peer(type("Peer", (), {"connection": make(sock)}))

    def _on_frame(self, peer: Any, frame: Frame[Kind]) -> None:
        self._send(peer, Kind.REPLY, memoryview(frame.body), clock=frame.header.clock)

    def _on_invalid_frame(self, peer: Any, error: WireError) -> None:
        peer.connection.end(pack(Kind.REPLY, self.me, meta={"why": str(error)}))


def test_a_loop_serves_peers_beside_strangers_and_ends() -> None:
    loop = Echo(7, listener := socket.create_server(("127.0.0.1", 0)))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    stranger, *socks = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    one, other = (make(sock, connects=True) for sock in socks)
    one.send(pack(Kind.REQUEST, 0, clock=2, body_bytes=1 << 16), memoryview(bytes(1 << 16)))
    assert one.await_frame(LIMIT_S).header == (Kind.REPLY, 7, 0, 2, 0, 1 << 16)
    other.send(BAD["large body"])
    assert other.await_frame(LIMIT_S).meta["why"].endswith("must have 0")
    stranger.close()
    other.close()
    while len(loop._peers) != 1:
        time.sleep(0.01)
    loop.is_stopped = True
    loop.wake()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(ConnectionError):
        one.await_frame(LIMIT_S)
    one.close()
