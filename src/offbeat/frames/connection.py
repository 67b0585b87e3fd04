"""Connection that proves the secret, then sends and receives frames over a non-blocking socket."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

from offbeat.frames.frames import Frame, Header, K, Reader
from offbeat.frames.greeting import Greeting

AT_ONCE_BYTES = 8 << 20  # bytes to receive from one peer before other peers
_RECEIVE_BYTES = 1 << 20
NOTHING = memoryview(b"")

Views = list[memoryview]
Room = Callable[[Header[K]], tuple[Any, memoryview]]


class Connection(Generic[K]):
    """Proves the secret of the job, then sends and receives frames, without blocking.

    No frame is sent or parsed before the other end has proved the secret. A body is sent without a
    copy, so it must not change until `idle`. A frame queued by `send_later` is created when all
    earlier frames have been sent, so that at most one such frame exists at a time.

    Args:
        sock: connected socket, or a socket that is still connecting.
        kinds: kinds of frames.
        room: see `Reader`.
        secret: secret of the job; or all secrets that the end accepts that has not opened the
            connection.
        connects: whether this end has opened the connection.

    Attributes:
        received_s: monotonic time of the last received bytes.
        sent_s: monotonic time of the last sent bytes.
        bytes_sent: number of sent bytes of frames.
    """

    def __init__(
        self,
        sock: socket.socket,
        kinds: type[K],
        room: Room[K],
        secret: bytes | Sequence[bytes],
        *,
        connects: bool,
    ):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._reader = Reader(kinds, room)
        self._greeting = Greeting(secret, connects=connects)
        self._proof = self._greeting.outgoing  # bytes of the proof to send
        self._out: deque[memoryview | Callable[[], Views]] = deque()
        self._ending = False
        self.received_s = self.sent_s = time.monotonic()
        self.bytes_sent = 0

    @property
    def is_proved(self) -> bool:
        """Whether the other end has proved the secret."""
        return self._greeting.missing_bytes == 0

    @property
    def idle(self) -> bool:
        """Whether all bytes that may be sent now have been passed to the operating system."""
        return not (self._proof or (self.is_proved and self._out))

    @property
    def events(self) -> int:
        """Selector events to wait for."""
        return selectors.EVENT_READ | (0 if self.idle else selectors.EVENT_WRITE)

    def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Queue a frame."""
        self._out.append(memoryview(head))
        if body is not None and len(body):
            self._out.append(body)

    def send_later(self, make: Callable[[], Views]) -> None:
        """Queue the buffers that `make` returns. It is called after all earlier frames are sent."""
        self._out.append(make)

    def end(self, head: bytes) -> None:
        """Queue a last frame, after which the sending side is closed. Discard received bytes.

        Close the connection once the other end has done so: closing a socket with unread bytes may
        discard the last frame.
        """
        self.send(head)
        self._ending = True

    def flush(self) -> None:
        """Send queued bytes until the socket would block."""
        try:
            while self._proof:
                self._proof = self._proof[self._send(self._proof) :]
            while self.is_proved and self._out:
                first = self._out[0]
                if not isinstance(first, memoryview):
                    self._out.popleft()
                    self._out.extendleft(view for view in reversed(first()) if len(view))
                    continue
                count = self._send(first)
                self.bytes_sent += count
                if count == len(first):
                    self._out.popleft()
                else:
                    self._out[0] = first[count:]
            if self._ending:
                self.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return

    def _send(self, data: bytes | memoryview) -> int:
        count = self.sock.send(data)
        self.sent_s = time.monotonic()
        return count

    def receive(self) -> Iterator[Frame[K]]:
        """Yield the complete frames that have arrived, up to about `AT_ONCE_BYTES`.

        Process each frame before you ask for the next one: the header of the next frame is checked
        against the state that this frame leaves.

        Raises:
            ConnectionError: the peer has closed the connection, or has not proved the secret.
            WireError: the bytes are no valid frame.
        """
        taken = 0
        while taken < AT_ONCE_BYTES:
            try:
                count, frame = self._read() if self.is_proved else self._read_proof()
            except BlockingIOError:
                return
            taken += count
            if frame is not None:
                yield frame

    def _read_proof(self) -> tuple[int, None]:
        data = self.sock.recv(self._greeting.missing_bytes)
        self._greeting.feed(data)
        self._proof += self._greeting.outgoing
        self.flush()
        return len(data), None

    def _read(self) -> tuple[int, Frame[K] | None]:
        count = 0

        def receive(into: memoryview) -> int:
            nonlocal count
            count = self.sock.recv_into(into[:_RECEIVE_BYTES])
            return count

        if self._ending:
            if not receive(memoryview(bytearray(_RECEIVE_BYTES))):
                raise ConnectionResetError("the other end has closed the connection")
            return count, None
        frame = self._reader.read(receive)
        self.received_s = time.monotonic()
        return count, frame

    def await_frame(self, limit_s: float) -> Frame[K]:
        """Send queued frames, and return the next received frame.

        Raises:
            TimeoutError: no frame is complete, and nothing has arrived for `limit_s` seconds.
        """
        begun_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            key = selector.register(self.sock, selectors.EVENT_READ)
            while time.monotonic() < (end := max(begun_s, self.received_s) + limit_s):
                self.flush()
                for frame in self.receive():
                    return frame
                if key.events != self.events:
                    key = selector.modify(self.sock, self.events)
                selector.select(end - time.monotonic())
        raise TimeoutError(f"no answer within {limit_s:g} s")

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
