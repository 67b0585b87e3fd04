"""Connections of a worker to its neighbours, handled by one thread.

Of two neighbours the one with the larger id connects, and reconnects after a disconnection. No
frame is parsed before the other end has proved that it has the secret of the job. The first frame
is HELLO.
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

RETRY_S = 0.3  # seconds between two attempts to connect; grows with each attempt
MAX_RETRY_S = 5.0
MAX_PENDING = 64
HEARTBEATS = 4  # heartbeats per `silent_s` seconds
NOTHING = memoryview(b"")
STRANGER_KINDS = (Kind.TIME, Kind.JOIN)  # requests of workers that are not neighbours

Address = tuple[str, int]


class Listener(ABC):
    """Receiver of events of the connections."""

    @abstractmethod
    def hello(self, peer: int) -> dict[str, Any]:
        """Return the metadata of the HELLO to a neighbour."""

    @abstractmethod
    def on_connect(self, peer: int, hello: dict[str, Any]) -> None:
        """Process the HELLO of a neighbour that has connected. Raise WireError if it is invalid."""

    @abstractmethod
    def on_disconnect(self, peer: int, why: str) -> None:
        """Process the disconnection of a neighbour."""

    @abstractmethod
    def answer_stranger(self, frame: Frame[Kind]) -> tuple[bytes, memoryview | None]:
        """Return the answer to a worker that is not a neighbour. Raise WireError to refuse it."""

    @abstractmethod
    def body_buffer(self, peer: int, header: Header[Kind]) -> tuple[Any, memoryview]:
        """Return an object and its memory for the body of a frame. Raise WireError if the frame is
        not expected.
        """

    @abstractmethod
    def on_frame(self, peer: int, frame: Frame[Kind]) -> None:
        """Process a frame. Raise WireError if it is invalid."""


@dataclass(eq=False)
class _Peer:
    """One connection, in three phases: proof of the secret, HELLO, frames.

    Attributes:
        sock: socket of the connection.
        greeting: proof of the secret.
        peer: id of the neighbour; None until known.
        connecting: whether the socket is still connecting.
        connection: frames of the connection; None before the proof is complete.
        came_s: local monotonic time of the creation.
    """

    sock: socket.socket
    greeting: Greeting
    peer: int | None = None
    connecting: bool = False
    connection: Connection[Kind] | None = None
    came_s: float = field(default_factory=time.monotonic)


class Peers:
    """Connections of worker `me` to its neighbours.

    Args:
        me: id of this worker.
        secret: secret of the job.
        neighbours: addresses of the neighbours.
        door: socket on which neighbours connect to this worker.
        silent_s: seconds without a frame after which a connection is closed.
        listener: receiver of events.
        joins: whether this worker joins a running job. It then connects to all neighbours, because
            its address is unknown to them.
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
        self._connections: dict[int, _Peer] = {}  # connections of neighbours, by id
        self._pending: set[_Peer] = set()  # connections without a HELLO
        self._tries = dict.fromkeys(neighbours, 0)
        self._retry_at_s = dict.fromkeys((n for n in neighbours if n < me or joins), 0.0)
        self._sent_before = 0
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        for sock in (door, self._wake_receiver):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._door = door

    # ---- called from any thread -------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread that waits in `process_events`."""
        with suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"!")

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all connections."""
        lines = list(self._connections.values())
        return self._sent_before + sum(n.connection.bytes_sent for n in lines if n.connection)

    # ---- called from the gossip thread ------------------------------------------------------

    def process_events(self, wait_s: float) -> None:
        """Wait for at most `wait_s` seconds for events of the sockets, and process them."""
        for key, events in self._selector.select(max(0.0, min(wait_s, self._due_s()))):
            if key.fileobj is self._wake_receiver:
                with suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            elif key.fileobj is self._door:
                self._accept()
            else:
                self._handle(key.data, events)
        self._check_connections()

    def send(self, peer: int, kind: Kind, body: memoryview | None = None, **header: Any) -> None:
        """Send a frame as soon as the socket accepts it. Discard it if the neighbour is not
        connected.
        """
        line = self._connections.get(peer)
        if line is None or line.connection is None:
            return
        size = 0 if body is None else len(body)
        line.connection.send(pack(kind, self.me, body_bytes=size, **header), body)
        self._update_events(line)

    def reachable(self) -> list[int]:
        """Return the connected neighbours."""
        return list(self._connections)

    def drop(self, peer: int, why: str) -> None:
        """Close the connection to a neighbour."""
        if peer in self._connections:
            self._disconnect(self._connections[peer], why)

    def expect(self, peer: int, address: Address | None = None) -> None:
        """Accept connections of a neighbour, and store its new address."""
        self._tries.setdefault(peer, 0)
        if address is not None:
            self._addresses[peer] = address

    def stop_reconnecting(self, peer: int) -> None:
        """Stop connecting to a neighbour."""
        self._retry_at_s.pop(peer, None)

    def drain(self, limit_s: float) -> None:
        """Write queued frames to the sockets for at most `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not all(
            line.connection is None or line.connection.idle for line in self._connections.values()
        ):
            self.process_events(end - time.monotonic())

    def finish(self, limit_s: float) -> None:
        """Wait for at most `limit_s` seconds until all neighbours have closed their connections.

        Closing a socket with unread bytes would discard frames that the neighbour has not read.
        """
        self._retry_at_s = {}
        end = time.monotonic() + limit_s
        while self._connections and time.monotonic() < end:
            self.process_events(end - time.monotonic())

    def close(self) -> None:
        """Close all sockets."""
        for line in [*self._connections.values(), *self._pending]:
            line.sock.close()
        self._selector.close()
        for sock in (self._door, self._wake_sender, self._wake_receiver):
            sock.close()

    # ---- new connections --------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._door.accept()
            self._register(_Peer(sock, Greeting(self._secret, connects=False)))
        if len(self._pending) > MAX_PENDING:
            self._disconnect(min(self._pending, key=lambda line: line.came_s), "too many strangers")

    def _connect(self, peer: int) -> None:
        self._tries[peer] += 1
        wait_s = min(RETRY_S * 1.5 ** (self._tries[peer] - 1), MAX_RETRY_S)
        self._retry_at_s[peer] = time.monotonic() + wait_s
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex(self._addresses[peer]) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._register(_Peer(sock, Greeting(self._secret, connects=True), peer, connecting=True))

    def _register(self, line: _Peer) -> None:
        line.sock.setblocking(False)
        self._pending.add(line)
        events = selectors.EVENT_WRITE if line.connecting else selectors.EVENT_READ
        self._selector.register(line.sock, events, line)
        if not line.connecting:
            self._call_guarded(line, self._reply)

    def _handle(self, line: _Peer, events: int) -> None:
        if line.connecting:
            self._call_guarded(line, self._finish_connecting)
            return
        if events & selectors.EVENT_READ:
            self._call_guarded(line, self._read)
        if events & selectors.EVENT_WRITE:
            self._call_guarded(line, self._write)

    def _call_guarded(self, line: _Peer, act: Callable[[_Peer], None]) -> None:
        """Call `act` on an open connection. Close the connection on an error, and send REFUSED on a
        WireError.
        """
        try:
            if self._is_open(line):
                act(line)
        except WireError as error:
            with suppress(OSError):
                line.sock.send(pack(Kind.REFUSED, self.me, meta={"why": str(error)}))
            self._disconnect(line, str(error))
        except OSError as error:
            self._disconnect(line, str(error) or "the connection broke")

    def _is_open(self, line: _Peer) -> bool:
        return line in self._pending or self._is_identified(line)

    def _is_identified(self, line: _Peer) -> bool:
        return line.peer is not None and self._connections.get(line.peer) is line

    def _finish_connecting(self, line: _Peer) -> None:
        failed = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, "no connection")
        line.connecting = False
        self._selector.modify(line.sock, selectors.EVENT_READ, line)

    def _read(self, line: _Peer) -> None:
        while line.connection is None:
            try:
                data = line.sock.recv(line.greeting.missing_bytes)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            line.greeting.feed(data)
            self._reply(line)
        for frame in line.connection.receive():
            if not self._is_open(line):
                return
            if line in self._pending:
                self._introduce(line, frame)
            elif frame.header.kind is Kind.REFUSED:
                raise ConnectionResetError(f"it refuses: {frame.meta.get('why')}")
            else:
                self._listener.on_frame(frame.header.rank, frame)

    def _reply(self, line: _Peer) -> None:
        """Send the next part of the proof. Send HELLO once the proof is complete."""
        if line.greeting.outgoing:
            line.sock.send(line.greeting.outgoing)
        if line.greeting.missing_bytes == 0:
            line.connection = Connection(line.sock, Kind, lambda header: self._buffer(line, header))
            if line.peer is not None:
                self._say_hello(line, line.peer)

    def _say_hello(self, line: _Peer, peer: int) -> None:
        assert line.connection is not None
        line.connection.send(pack(Kind.HELLO, self.me, meta=self._listener.hello(peer)))
        self._write(line)

    def _introduce(self, line: _Peer, frame: Frame[Kind]) -> None:
        """Process the first frame: a HELLO, or the request of a worker that is not a neighbour."""
        peer = frame.header.rank
        if frame.header.kind in STRANGER_KINDS:
            assert line.connection is not None
            line.connection.send(*self._listener.answer_stranger(frame))
            self._write(line)
            return
        if frame.header.kind is Kind.REFUSED:
            raise ConnectionResetError(f"it refuses: {frame.meta.get('why')}")
        if peer in self._connections:
            self._disconnect(self._connections[peer], "it has connected anew")
        if line.peer is None:
            self._say_hello(line, peer)
        if line not in self._pending:
            return
        self._pending.discard(line)
        line.peer, self._connections[peer], self._tries[peer] = peer, line, 0
        if peer > self.me:
            self._retry_at_s.pop(peer, None)
        self._listener.on_connect(peer, frame.meta)

    def _buffer(self, line: _Peer, header: Header[Kind]) -> tuple[Any, memoryview]:
        if line in self._pending:
            if header.kind in STRANGER_KINDS and line.peer is None and not header.body_bytes:
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
        return self._listener.body_buffer(header.rank, header)

    def _write(self, line: _Peer) -> None:
        if line.connection is None:
            return
        line.connection.flush()
        self._update_events(line)

    def _update_events(self, line: _Peer) -> None:
        """Wait for the socket events that the connection needs."""
        assert line.connection is not None
        if line.connection.events != self._selector.get_key(line.sock).events:
            self._selector.modify(line.sock, line.connection.events, line)

    # ---- closed connections -----------------------------------------------------------------

    def _disconnect(self, line: _Peer, why: str) -> None:
        known = self._is_identified(line)
        if not known and line not in self._pending:
            return
        self._pending.discard(line)
        self._selector.unregister(line.sock)
        line.sock.close()
        if line.connection is not None:
            self._sent_before += line.connection.bytes_sent
        if known:
            assert line.peer is not None
            del self._connections[line.peer]
            self._listener.on_disconnect(line.peer, why)

    def _due_s(self) -> float:
        """Return the seconds until the next heartbeat, timeout or connection attempt."""
        now = time.monotonic()
        wait_s = self._silent_s / HEARTBEATS
        tries = [at for peer, at in self._retry_at_s.items() if not self._has_connection(peer)]
        return min([wait_s, *(at - now for at in tries)])

    def _has_connection(self, peer: int) -> bool:
        """Return whether a connection to a neighbour exists or is in progress."""
        return peer in self._connections or any(line.peer == peer for line in self._pending)

    def _check_connections(self) -> None:
        """Send due heartbeats, close silent connections, and connect to missing neighbours."""
        now = time.monotonic()
        for peer, line in list(self._connections.items()):
            connection = line.connection
            assert connection is not None
            if now - connection.received_s > self._silent_s:
                self._disconnect(line, f"it has been silent for {self._silent_s:g} s")
            elif connection.idle and now - connection.sent_s >= self._silent_s / HEARTBEATS:
                self.send(peer, Kind.BEAT)
        for line in list(self._pending):
            spoke_s = line.connection.sent_s if line.connection else 0.0
            if now - max(line.came_s, spoke_s) > self._silent_s:
                self._disconnect(line, "it has not said who it is")
        for peer, at in list(self._retry_at_s.items()):
            if now >= at and not self._has_connection(peer):
                self._connect(peer)


def open_listener(address: str, backlog: int) -> socket.socket:
    """Return a socket on which this worker accepts connections."""
    return socket.create_server((address, 0), backlog=backlog)
