"""Peers: connections to the neighbours, on one thread that sleeps while there is nothing to do.

Of two neighbours the larger id connects, and connects again when a connection breaks. Nothing is
parsed before the other end has proved the job's secret; the first frame is its HELLO.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from offbeat.frames.connection import Connection
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.frames.greeting import Greeting
from offbeat.gossip.protocol import Kind

AGAIN_S = 0.3  # between two tries to connect; longer after the first ones
MOST_AGAIN_S = 5.0
MOST_STRANGERS = 64
BEATS = 4  # signs of life within the time after which a neighbour counts as silent
NOTHING = memoryview(b"")
GUESTS = (Kind.TIME, Kind.JOIN)  # what may be asked instead of a HELLO

Address = tuple[str, int]


class Listener(ABC):
    """Who is told what neighbours do."""

    @abstractmethod
    def hello(self, peer: int) -> dict[str, Any]:
        """What to say first to this neighbour."""

    @abstractmethod
    def came(self, peer: int, said: dict[str, Any]) -> None:
        """It can be talked to; what it said first. WireError if that cannot be."""

    @abstractmethod
    def went(self, peer: int, why: str) -> None:
        """It cannot be talked to any more."""

    @abstractmethod
    def guest(self, frame: Frame[Kind]) -> tuple[bytes, memoryview | None]:
        """The answer to somebody who asks and is no neighbour. WireError to refuse."""

    @abstractmethod
    def room(self, peer: int, header: Header[Kind]) -> tuple[Any, memoryview]:
        """Where a frame's body goes; WireError if it is not welcome."""

    @abstractmethod
    def heard(self, peer: int, frame: Frame[Kind]) -> None:
        """A frame has arrived. WireError if it cannot be."""


@dataclass(eq=False)
class _Line:
    """One connection: first a proof, then a HELLO, then frames of `peer`."""

    sock: socket.socket
    greeting: Greeting
    peer: int | None = None
    connecting: bool = False
    connection: Connection[Kind] | None = None
    came_s: float = field(default_factory=time.monotonic)


class Peers:
    """The neighbours of worker `me`, at these addresses, and the socket at which they find it.

    If it `joins`, it connects to all of them at first: they do not know where it is.
    """

    def __init__(
        self,
        me: int,
        secret: bytes,
        neighbours: Mapping[int, Address],
        door: socket.socket,
        silent_s: float,
        listener: Listener,
        *,
        joins: bool = False,
    ):
        self.me, self._secret, self._silent_s = me, secret, silent_s
        self._addresses, self._listener = dict(neighbours), listener
        self._lines: dict[int, _Line] = {}  # of neighbours that can be talked to
        self._others: set[_Line] = set()  # that are not yet known
        self._tries = dict.fromkeys(neighbours, 0)
        self._again_s = dict.fromkeys((n for n in neighbours if n < me or joins), 0.0)
        self._sent_before = 0
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for sock in (door, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._door = door

    # ---- from any thread --------------------------------------------------------------------

    def wake(self) -> None:
        """End the wait of `turn`."""
        with suppress(BlockingIOError, OSError):
            self._wakes.send(b"!")

    @property
    def bytes_sent(self) -> int:
        """Over all connections."""
        lines = list(self._lines.values())
        return self._sent_before + sum(n.connection.bytes_sent for n in lines if n.connection)

    # ---- from its thread --------------------------------------------------------------------

    def turn(self, wait_s: float) -> None:
        """Wait for something to happen, so long at most, and see to it."""
        for key, events in self._selector.select(max(0.0, min(wait_s, self._due_s()))):
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is self._door:
                self._accept()
            else:
                self._handle(key.data, events)
        self._look_round()

    def send(self, peer: int, kind: Kind, body: memoryview | None = None, **header: Any) -> None:
        """Queue a frame for the next turn; nothing if the neighbour is not there."""
        line = self._lines.get(peer)
        if line is None or line.connection is None:
            return
        size = 0 if body is None else len(body)
        line.connection.send(pack(kind, self.me, body_bytes=size, **header), body)
        self._await(line)

    def present(self) -> list[int]:
        """Neighbours that can be talked to."""
        return list(self._lines)

    def drop(self, peer: int, why: str) -> None:
        """Break the connection to this neighbour."""
        if peer in self._lines:
            self._break(self._lines[peer], why)

    def expect(self, peer: int, address: Address | None = None) -> None:
        """This worker may come, or is to be found there now."""
        self._tries.setdefault(peer, 0)
        if address is not None:
            self._addresses[peer] = address

    def forget(self, peer: int) -> None:
        """Never connect to this one again."""
        self._again_s.pop(peer, None)

    def drain(self, limit_s: float) -> None:
        """Hand what is queued to the system, for so long at most."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not all(
            line.connection is None or line.connection.idle for line in self._lines.values()
        ):
            self.turn(end - time.monotonic())

    def finish(self, limit_s: float) -> None:
        """Wait until the neighbours have read everything and closed, for so long at most. Closing
        with bytes unread would take back what they have not read."""
        self._again_s = {}
        end = time.monotonic() + limit_s
        while self._lines and time.monotonic() < end:
            self.turn(end - time.monotonic())

    def close(self) -> None:
        """Close every socket."""
        for line in [*self._lines.values(), *self._others]:
            line.sock.close()
        self._selector.close()
        for sock in (self._door, self._wakes, self._woken):
            sock.close()

    # ---- connections come -------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._door.accept()
            self._begin(_Line(sock, Greeting(self._secret, asks=False)))
        if len(self._others) > MOST_STRANGERS:
            self._break(min(self._others, key=lambda line: line.came_s), "too many strangers")

    def _connect(self, peer: int) -> None:
        self._tries[peer] += 1
        wait_s = min(AGAIN_S * 1.5 ** (self._tries[peer] - 1), MOST_AGAIN_S)
        self._again_s[peer] = time.monotonic() + wait_s
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex(self._addresses[peer]) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._begin(_Line(sock, Greeting(self._secret, asks=True), peer, connecting=True))

    def _begin(self, line: _Line) -> None:
        line.sock.setblocking(False)
        self._others.add(line)
        events = selectors.EVENT_WRITE if line.connecting else selectors.EVENT_READ
        self._selector.register(line.sock, events, line)
        if not line.connecting:
            self._guarded(line, self._reply)

    def _handle(self, line: _Line, events: int) -> None:
        if line.connecting:
            self._guarded(line, self._connected)
            return
        if events & selectors.EVENT_READ:
            self._guarded(line, self._read)
        if events & selectors.EVENT_WRITE:
            self._guarded(line, self._write)

    def _guarded(self, line: _Line, act: Callable[[_Line], None]) -> None:
        try:
            if self._is_open(line):
                act(line)
        except WireError as error:
            with suppress(OSError):
                line.sock.send(pack(Kind.REFUSED, self.me, meta={"why": str(error)}))
            self._break(line, str(error))
        except OSError as error:
            self._break(line, str(error) or "the connection broke")

    def _is_open(self, line: _Line) -> bool:
        return line in self._others or self._is_known(line)

    def _is_known(self, line: _Line) -> bool:
        return line.peer is not None and self._lines.get(line.peer) is line

    def _connected(self, line: _Line) -> None:
        failed = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, "no connection")
        line.connecting = False
        self._selector.modify(line.sock, selectors.EVENT_READ, line)

    def _read(self, line: _Line) -> None:
        while line.connection is None:
            try:
                data = line.sock.recv(line.greeting.wants)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            line.greeting.feed(data)
            self._reply(line)
        for frame in line.connection.receive():
            if not self._is_open(line):
                return
            if line in self._others:
                self._introduce(line, frame)
            elif frame.header.kind is Kind.REFUSED:
                raise ConnectionResetError(f"it refuses: {frame.meta.get('why')}")
            else:
                self._listener.heard(frame.header.rank, frame)

    def _reply(self, line: _Line) -> None:
        """Send what the proof asks for; after it, the HELLO."""
        if line.greeting.outgoing:
            line.sock.send(line.greeting.outgoing)
        if line.greeting.wants == 0:
            line.connection = Connection(line.sock, Kind, lambda header: self._room(line, header))
            if line.peer is not None:
                self._say_hello(line, line.peer)

    def _say_hello(self, line: _Line, peer: int) -> None:
        assert line.connection is not None
        line.connection.send(pack(Kind.HELLO, self.me, meta=self._listener.hello(peer)))
        self._write(line)

    def _introduce(self, line: _Line, frame: Frame[Kind]) -> None:
        """The other end has said who it is, or asks."""
        peer = frame.header.rank
        if frame.header.kind in GUESTS:
            assert line.connection is not None
            line.connection.send(*self._listener.guest(frame))
            self._write(line)
            return
        if frame.header.kind is Kind.REFUSED:
            raise ConnectionResetError(f"it refuses: {frame.meta.get('why')}")
        if peer in self._lines:
            self._break(self._lines[peer], "it has connected anew")
        if line.peer is None:
            self._say_hello(line, peer)
        if line not in self._others:
            return
        self._others.discard(line)
        line.peer, self._lines[peer], self._tries[peer] = peer, line, 0
        if peer > self.me:
            self._again_s.pop(peer, None)
        self._listener.came(peer, frame.meta)

    def _room(self, line: _Line, header: Header[Kind]) -> tuple[Any, memoryview]:
        if line in self._others:
            if header.kind in GUESTS and line.peer is None and not header.body_bytes:
                return None, NOTHING
            if header.kind not in (Kind.HELLO, Kind.REFUSED):
                raise WireError(f"{header.kind.name} is not expected now")
            if header.rank not in self._tries or line.peer not in (None, header.rank):
                raise WireError(f"worker ({header.rank}) is no neighbour of {self.me}")
            return None, NOTHING
        if header.rank != line.peer:
            raise WireError(f"worker ({header.rank}) must be {line.peer}")
        if header.kind is Kind.HELLO:
            raise WireError("HELLO is not expected now")
        return self._listener.room(header.rank, header)

    def _write(self, line: _Line) -> None:
        if line.connection is None:
            return
        line.connection.flush()
        self._await(line)

    def _await(self, line: _Line) -> None:
        """Wait for what the connection can go on with."""
        assert line.connection is not None
        if line.connection.events != self._selector.get_key(line.sock).events:
            self._selector.modify(line.sock, line.connection.events, line)

    # ---- connections go ---------------------------------------------------------------------

    def _break(self, line: _Line, why: str) -> None:
        known = self._is_known(line)
        if not known and line not in self._others:
            return
        self._others.discard(line)
        self._selector.unregister(line.sock)
        line.sock.close()
        if line.connection is not None:
            self._sent_before += line.connection.bytes_sent
        if known:
            assert line.peer is not None
            del self._lines[line.peer]
            self._listener.went(line.peer, why)

    def _due_s(self) -> float:
        """Seconds until somebody must be looked after."""
        now = time.monotonic()
        wait_s = self._silent_s / BEATS
        tries = [at for peer, at in self._again_s.items() if not self._known(peer)]
        return min([wait_s, *(at - now for at in tries)])

    def _known(self, peer: int) -> bool:
        """Whether there is a connection to it, or one is being made."""
        return peer in self._lines or any(line.peer == peer for line in self._others)

    def _look_round(self) -> None:
        """Show signs of life, see who is silent, and connect to who is not there."""
        now = time.monotonic()
        for peer, line in list(self._lines.items()):
            connection = line.connection
            assert connection is not None
            if now - connection.heard_s > self._silent_s:
                self._break(line, f"it has been silent for {self._silent_s:g} s")
            elif connection.idle and now - connection.spoke_s >= self._silent_s / BEATS:
                self.send(peer, Kind.BEAT)
        for line in list(self._others):
            spoke_s = line.connection.spoke_s if line.connection else 0.0
            if now - max(line.came_s, spoke_s) > self._silent_s:
                self._break(line, "it has not said who it is")
        for peer, at in list(self._again_s.items()):
            if now >= at and not self._known(peer):
                self._connect(peer)


def door(address: str, backlog: int) -> socket.socket:
    """A socket at which neighbours find this worker."""
    return socket.create_server((address, 0), backlog=backlog)
