"""A connection: frames over one socket that never blocks."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic

from offbeat.frames.frames import Frame, Header, K, Reader

AT_ONCE_BYTES = 8 << 20  # from one peer before others have their turn
_RECEIVE_BYTES = 1 << 20

Views = list[memoryview]


class Connection(Generic[K]):
    """Sends and receives frames as far as the socket lets it.

    A body is sent from where it lies, so it must stay as it is until `idle`. One that is made by
    `send_later` is made when its turn comes: only one of them exists at a time.
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
        self.heard_s = self.spoke_s = time.monotonic()
        self.bytes_sent = 0

    @property
    def idle(self) -> bool:
        """Whether everything has been handed to the system."""
        return not self._out

    @property
    def events(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (0 if self.idle else selectors.EVENT_WRITE)

    def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Queue a frame."""
        self._out.append(memoryview(head))
        if body is not None and len(body):
            self._out.append(body)

    def send_later(self, make: Callable[[], Views]) -> None:
        """Queue what `make` returns when its turn comes."""
        self._out.append(make)

    def flush(self) -> None:
        """Send until the socket is full."""
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
            self.spoke_s = time.monotonic()
            if count == len(first):
                self._out.popleft()
            else:
                self._out[0] = first[count:]

    def receive(self) -> Iterator[Frame[K]]:
        """Whole frames of what has arrived, not all of it at once if it is much: each is to be
        dealt with before the next one is judged. ConnectionError when the peer has closed,
        WireError for what cannot be a frame."""
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
        self.heard_s = time.monotonic()
        return count, frame

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
