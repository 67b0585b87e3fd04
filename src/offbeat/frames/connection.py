"""Connection that sends and receives frames over one non-blocking socket."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic

from offbeat.frames.frames import Frame, Header, K, Reader

AT_ONCE_BYTES = 8 << 20  # bytes to receive from one peer before other peers
_RECEIVE_BYTES = 1 << 20

Views = list[memoryview]


class Connection(Generic[K]):
    """Sends and receives frames without blocking.

    A body is sent without a copy, so it must not change until `idle`. A frame queued by
    `send_later` is created when all earlier frames have been sent, so that at most one such frame
    exists at a time.

    Attributes:
        received_s: monotonic time of the last received bytes.
        sent_s: monotonic time of the last sent bytes.
        bytes_sent: number of sent bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        kinds: type[K],
        room: Callable[[Header[K]], tuple[Any, memoryview]],
    ):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._reader = Reader(kinds, room)
        self._out: deque[memoryview | Callable[[], Views]] = deque()
        self.received_s = self.sent_s = time.monotonic()
        self.bytes_sent = 0

    @property
    def idle(self) -> bool:
        """Whether all queued bytes have been passed to the operating system."""
        return not self._out

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

    def flush(self) -> None:
        """Send queued bytes until the socket would block."""
        while self._out:
            first = self._out[0]
            if not isinstance(first, memoryview):
                self._out.popleft()
                self._out.extendleft(view for view in reversed(first()) if len(view))
                continue
            try:
                count = self.sock.send(first)
            except BlockingIOError:
                return
            self.bytes_sent += count
            self.sent_s = time.monotonic()
            if count == len(first):
                self._out.popleft()
            else:
                self._out[0] = first[count:]

    def receive(self) -> Iterator[Frame[K]]:
        """Yield the complete frames that have arrived, up to about `AT_ONCE_BYTES`.

        Process each frame before the next one, because its header is checked against the state
        after it.

        Raises:
            ConnectionError: the peer has closed the connection.
            WireError: the bytes are no valid frame.
        """
        taken = 0
        while taken < AT_ONCE_BYTES:
            try:
                count, frame = self._read()
            except BlockingIOError:
                return
            taken += count
            if frame is not None:
                yield frame

    def _read(self) -> tuple[int, Frame[K] | None]:
        count = 0

        def receive(into: memoryview) -> int:
            nonlocal count
            count = self.sock.recv_into(into[:_RECEIVE_BYTES])
            return count

        frame = self._reader.read(receive)
        self.received_s = time.monotonic()
        return count, frame

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
