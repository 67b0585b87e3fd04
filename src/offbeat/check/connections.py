"""Connections between two ranks of the check, with the proof of the job's secret."""

from __future__ import annotations

import socket
import struct
import time

from offbeat.core.transport.listeners import open_listener
from offbeat.frames.connection import prove

LIMIT_S = 3.0  # longest time to open a connection
MOST_PORT = 65535
PROOF_S = 1.0  # longest time for the proof of a client: strangers must not delay the check
_HELLO = struct.Struct("!II")  # rank and step of the client


def listen(address: str, port: int | None, backlog: int) -> socket.socket:
    """Return a socket that listens on one address; without a port, on one of OFFBEAT_PORTS.

    Raises:
        ValueError: the port is in use, or does not exist.
    """
    if port is None:
        return open_listener(address, backlog)
    if port > MOST_PORT:
        raise ValueError(f"--port ({port}) must be at most {MOST_PORT}; give a smaller port")
    try:
        return socket.create_server((address, port), backlog=backlog)
    except OSError as error:
        raise ValueError(
            f"--port ({port}) cannot be opened on {address} ({error.strerror}); give another port"
        ) from None


def connect(
    own: str, peer: tuple[str, int], secret: bytes, rank: int, step: int, until_s: float
) -> socket.socket:
    """Return a connection from the address `own` to the listener of a peer.

    Raises:
        OSError: the connection has not been opened until the monotonic time `until_s`.
    """
    s = socket.create_connection(peer, _seconds_until(until_s), source_address=(own, 0))
    try:
        prove(s, secret, connects=True, until_s=until_s)
        s.sendall(_HELLO.pack(rank, step))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        s.close()
        raise
    return s


def accept(
    listener: socket.socket, secret: bytes, rank: int, step: int, until_s: float
) -> socket.socket:
    """Return the connection that a rank opens in a step.

    Connections of other clients, of other steps and without the job's secret are closed.

    Raises:
        TimeoutError: the rank has not connected until the monotonic time `until_s`.
    """
    while True:
        listener.settimeout(_seconds_until(until_s))
        try:
            s, _ = listener.accept()
        except TimeoutError:
            continue
        try:
            proved_s = min(until_s, time.monotonic() + PROOF_S)
            prove(s, secret, connects=False, until_s=proved_s)
            if _HELLO.unpack(read_exactly(s, _HELLO.size)) == (rank, step):
                s.settimeout(_seconds_until(until_s))
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return s
        except OSError:
            pass
        s.close()


def read_exactly(s: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection. Raise OSError if it is closed before."""
    data = b""
    while len(data) < size:
        part = s.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def _seconds_until(until_s: float) -> float:
    """Return the seconds until a monotonic time. Raise TimeoutError if it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no connection in time")
    return left_s
