"""Connections that prove the secret of the job, then send and receive frames without blocking, and
the loop of one thread over those of a process."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from functools import partial
from itertools import count
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any, Generic, TypeVar

from offbeat.frames.frames import Frame, K, Room, Steps, WireError, pack, read_frames
from offbeat.frames.secret import CLOSED, proof_steps

AT_ONCE_BYTES = 8 << 20  # bytes to receive from one peer before other peers
NOTHING = memoryview(b"")

P = TypeVar("P", bound=Any)
"""Type of a peer: an object with the attribute `connection`, which may be None if it is closed."""


class Connection(Generic[K]):
    """Proves the secret of the job, then sends and receives frames, without blocking.

    No frame is sent or parsed before the other end has proved the secret. Frames are sent as far as
    the socket accepts them, and by `flush`. A body is sent without a copy, so it must not change
    until `idle`.

    Args:
        sock: connected socket, or a socket that is still connecting.
        kinds: kinds of frames.
        room: memory for bodies.
        secret: secret of the job.
        connects: whether this end has opened the connection.

    Attributes:
        is_proved: whether the other end has proved the secret.
        received_s: monotonic time of the last received bytes of frames.
        sent_s: monotonic time of the last sent bytes of frames; first that of the connection.
        bytes_sent: number of sent bytes of frames.
    """

    def __init__(
        self, sock: socket.socket, kinds: type[K], room: Room[K], secret: bytes, *, connects: bool
    ):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.is_proved, self.bytes_sent = sock, False, 0
        self.received_s = self.sent_s = time.monotonic()
        self._proof_out = bytearray()
        self._frames_out: deque[Callable[[], list[memoryview]]] = deque()
        self._views_out: list[memoryview] = []  # of the frame that is being sent
        self._frames: list[Frame[K]] = []  # complete frame, not yet returned
        proof = proof_steps(secret, self._proof_out.extend, connects=connects)
        self._steps = self._read(proof, read_frames(kinds, room, self._frames.append))
        self._due = next(self._steps)  # memory for the next received bytes

    @property
    def idle(self) -> bool:
        """Whether all bytes that may be sent now have been passed to the operating system."""
        return not (self._proof_out or (self.is_proved and (self._views_out or self._frames_out)))

    @property
    def events(self) -> int:
        """Selector events to wait for."""
        return EVENT_READ | (0 if self.idle else EVENT_WRITE)

    def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Send a frame after all earlier ones, see `send_later`."""
        self.send_later(lambda: [*filter(None, (memoryview(head), body))])

    def send_later(self, make: Callable[[], list[memoryview]]) -> None:
        """Send the buffers that `make` returns. It is called when all earlier frames are sent, so
        that at most one such frame exists at a time. A failure is raised by the next `flush`."""
        self._frames_out.append(make)
        with suppress(OSError):
            self.flush()

    def end(self, head: bytes) -> None:
        """Send a last frame, and close the sending side after it. Discard received bytes.

        Close the connection once the other end has done so: closing a socket with unread bytes may
        discard the last frame.
        """
        self._steps = (memoryview(bytearray(1 << 16)) for _ in count())
        self._due = next(self._steps)
        self.send(head)
        self.send_later(lambda: self.sock.shutdown(socket.SHUT_WR) or [])

    def flush(self) -> None:
        """Send queued bytes until the socket would block."""
        with suppress(BlockingIOError):
            while self._proof_out:
                del self._proof_out[: self.sock.send(self._proof_out)]
            while not self.idle:
                if not self._views_out:
                    self._views_out = self._frames_out.popleft()()
                    continue
                size = self.sock.send(self._views_out[0])
                self.sent_s, self.bytes_sent = time.monotonic(), self.bytes_sent + size
                self._views_out[0] = self._views_out[0][size:]
                if not self._views_out[0]:
                    del self._views_out[0]

    def receive(self) -> Iterator[Frame[K]]:
        """Yield the complete frames that have arrived, up to about `AT_ONCE_BYTES`.

        Process each frame before you ask for the next one: the header of the next frame is checked
        against the state that this frame leaves.

        Raises:
            ConnectionError: the peer has closed the connection, or has not proved the secret.
            WireError: the bytes are no valid frame. Close the connection, because later bytes
                cannot be assigned to frames.
        """
        taken = 0
        while taken < AT_ONCE_BYTES:
            try:
                size = self.sock.recv_into(self._due)
            except BlockingIOError:
                return
            if not size:
                self._steps.throw(ConnectionResetError(CLOSED))
            if self.is_proved:
                self.received_s = time.monotonic()
            self._due, taken = self._due[size:], taken + size
            while not self._due:
                self._due = next(self._steps)
            if self._frames:
                yield self._frames.pop()

    def _read(self, proof: Steps, frames: Steps) -> Steps:
        yield from proof
        self.is_proved = True
        yield from frames

    def await_frame(self, limit_s: float) -> Frame[K]:
        """Send queued frames, and return the next received frame.

        Raises:
            TimeoutError: no frame is complete, and nothing has arrived for `limit_s` seconds.
        """
        begun_s = time.monotonic()
        while (left_s := max(begun_s, self.received_s) + limit_s - time.monotonic()) > 0:
            self.flush()
            for frame in self.receive():
                return frame
            with DefaultSelector() as selector:
                selector.register(self.sock, self.events)
                selector.select(left_s)
        raise TimeoutError(f"no answer within {limit_s:g} s")

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def prove(sock: socket.socket, secret: bytes, *, connects: bool, until_s: float) -> None:
    """Exchange proofs over a socket that has no frames. See `proof_steps`.

    Raises:
        ConnectionError: the other end has closed the connection, or has not proved the secret.
        TimeoutError: the proof is not complete at the monotonic time `until_s`.
    """
    steps = proof_steps(secret, sock.sendall, connects=connects)
    for view in steps:
        while view:
            sock.settimeout(max(until_s - time.monotonic(), 1e-3))  # 0 would not block
            size = sock.recv_into(view)
            if not size:
                steps.throw(ConnectionResetError(CLOSED))
            view = view[size:]


class ConnectionLoop(ABC, Generic[P]):
    """Accepts connections, reads and writes frames of several peers, and can be woken.

    Derived classes call the methods with an underscore, in the thread of the loop.

    Args:
        me: sender of all frames.
        listener: socket on which other processes connect; None if none do.
    """

    def __init__(self, me: int, listener: socket.socket | None = None):
        self.me, self._listener = me, listener
        self._peers: set[P] = set()  # those whose connection is open
        self._selector = DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, EVENT_READ, partial(self._woken.recv, 4096))
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, EVENT_READ, partial(self._accept, listener))

    def wake(self) -> None:
        """Wake the thread of the loop. Any thread may call this method."""
        with suppress(OSError):  # the loop is closed, or the socket is full of earlier wake-ups
            self._waker.send(b"!")

    def close(self) -> None:
        """Close all sockets."""
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        for sock in filter(None, (self._listener, self._waker, self._woken)):
            sock.close()

    def _on_accept(self, sock: socket.socket) -> None:
        """Add the connection of a process that has connected to the listener."""
        raise NotImplementedError

    @abstractmethod
    def _on_frame(self, peer: P, frame: Frame[Any]) -> None:
        """Process a frame. Raise WireError if it is invalid."""

    @abstractmethod
    def _on_invalid_frame(self, peer: P, error: WireError) -> None:
        """Process an invalid frame."""

    def _on_connection_error(self, peer: P, error: OSError) -> None:
        """Process the failure of a connection, or its end."""
        self._drop(peer)

    def _add_peer(self, peer: P) -> None:
        """Read and write the frames of a peer from now on."""
        self._peers.add(peer)
        self._selector.register(peer.connection.sock, EVENT_READ, partial(self._process_peer, peer))

    def _drop(self, peer: P) -> None:
        """Close the connection of a peer, if it is open."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.connection.sock)
            peer.connection.close()

    def _send(self, peer: P, kind: IntEnum, body: memoryview | None = None, **header: Any) -> None:
        """Send a frame. Discard it if the connection is closed."""
        if peer in self._peers:
            size = 0 if body is None else len(body)
            peer.connection.send(pack(kind, self.me, body_bytes=size, **header), body)

    def _process_sockets(self, wait_s: float) -> None:
        """Wait for at most `wait_s` seconds for events of the sockets, and process them."""
        for peer in self._peers:
            key = self._selector.get_key(peer.connection.sock)
            self._selector.modify(key.fileobj, peer.connection.events, key.data)
        for key, _ in self._selector.select(max(0.0, wait_s)):
            key.data()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the other end has closed the connection
            self._on_accept(listener.accept()[0])

    def _process_peer(self, peer: P) -> None:
        if peer not in self._peers:  # it was dropped while events of others were processed
            return
        try:
            for frame in peer.connection.receive():
                self._on_frame(peer, frame)
                if peer not in self._peers:
                    return
            peer.connection.flush()
        except WireError as error:
            self._on_invalid_frame(peer, error)
        except OSError as error:
            self._on_connection_error(peer, error)
