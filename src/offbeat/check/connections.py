"""Connections between two ranks of the check, with the proof of the job's secret."""

from __future__ import annotations

import socket
import struct
import time

from offbeat.frames.greeting import Greeting

LIMIT_S = 3.0  # longest time to open a connection
PROOF_S = 1.0  # longest time for the proof of a client: strangers must not delay the check
_HELLO = struct.Struct("!II")  # rank and step of the client


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on one address.

    Raises:
        ValueError: the port is in use.
    """
    try:
        return socket.create_server((address, port), backlog=backlog)
    except OSError as error:
        raise ValueError(
            f"--port ({port}) cannot be opened on {address} ({error.strerror}); give another port"
        ) from None


def connect(own: str, peer: tuple[str, int], secret: bytes, rank: int, step: int) -> socket.socket:
    """Return a connection from the address `own` to the listener of a peer."""
    s = socket.create_connection(peer, LIMIT_S, source_address=(own, 0))
    try:
        _greet(s, Greeting(secret, connects=True))
        s.sendall(_HELLO.pack(rank, step))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        s.close()
        raise
    return s


def accept(listener: socket.socket, secret: bytes, rank: int, step: int) -> socket.socket:
    """Return the connection that a rank opens in a step.

    Connections of other clients, of other steps and without the job's secret are closed.

    Raises:
        TimeoutError: the rank has not connected within `LIMIT_S` seconds.
    """
    end_s = time.monotonic() + LIMIT_S
    while (left_s := end_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        s, _ = listener.accept()
        s.settimeout(min(left_s, PROOF_S))
        try:
            _greet(s, Greeting(secret, connects=False))
            if _HELLO.unpack(read_exactly(s, _HELLO.size)) == (rank, step):
                s.settimeout(LIMIT_S)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return s
        except OSError:
            pass
        s.close()
    raise TimeoutError(f"no connection in {LIMIT_S:g} s")


def read_exactly(s: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection. Raise OSError if it is closed before."""
    data = b""
    while len(data) < size:
        part = s.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def _greet(s: socket.socket, greeting: Greeting) -> None:
    s.sendall(greeting.outgoing)
    while greeting.missing_bytes:
        greeting.feed(s.recv(greeting.missing_bytes))
        s.sendall(greeting.outgoing)
