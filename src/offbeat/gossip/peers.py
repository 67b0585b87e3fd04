"""Connections of a worker to its neighbours, handled by one thread.

Of two neighbours the one with the larger id connects, and reconnects after a disconnection. No
frame is parsed before the other end has proved that it has the secret of the job. The first frame
is HELLO.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.frames.connection import NOTHING, Connection, ConnectionLoop
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.gossip.protocol import Kind

if TYPE_CHECKING:
    from offbeat.gossip.neighbours import Neighbours

RETRY_S = 0.3  # seconds between two attempts to connect; grows with each attempt
MAX_RETRY_S = 5.0
MAX_PENDING = 64
HEARTBEATS = 4  # heartbeats per `silent_s` seconds
STRANGER_KINDS = (Kind.TIME, Kind.JOIN)  # requests of workers that are not neighbours

Address = tuple[str, int]


@dataclass(eq=False)
class _Peer:
    """One connection: proof of the secret, HELLO, frames.

    Attributes:
        connection: the connection.
        peer: id of the neighbour; None until known.
    """

    connection: Connection[Kind]
    peer: int | None = None


class Peers(ConnectionLoop[_Peer]):
    """Connections of worker `me` to its neighbours.

    Args:
        me: id of this worker.
        secret: secret of the job.
        neighbours: addresses of the neighbours.
        door: socket on which neighbours connect to this worker.
        silent_s: seconds without a frame after which a connection is closed.
        joins: whether this worker joins a running job. It then connects to all neighbours, because
            its address is unknown to them.

    Attributes:
        receiver: receives frames and events of the connections.
        answer: returns the answer to a worker that is not a neighbour, or raises WireError.
    """

    receiver: Neighbours
    answer: Callable[[Frame[Kind]], tuple[bytes, memoryview | None]]

    def __init__(
        self,
        me: int,
        secret: bytes,
        neighbours: Mapping[int, Address],
        door: socket.socket,
        silent_s: float,
        *,
        joins: bool = False,
    ):
        super().__init__(me, door)
        self._secret, self._silent_s = secret, silent_s
        self._addresses = dict(neighbours)
        self._connections: dict[int, _Peer] = {}  # connections of neighbours, by id
        self._pending: set[_Peer] = set()  # connections without a HELLO
        self._tries = dict.fromkeys(neighbours, 0)
        self._retry_at_s = dict.fromkeys((n for n in neighbours if n < me or joins), 0.0)
        self._sent_before = 0

    # ---- called from any thread -------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all connections."""
        lines = list(self._connections.values())
        return self._sent_before + sum(line.connection.bytes_sent for line in lines)

    # ---- called from the gossip thread ------------------------------------------------------

    def process_events(self, wait_s: float) -> None:
        """Wait for at most `wait_s` seconds for events of the sockets, and process them."""
        self._process_sockets(min(wait_s, self._due_s()))
        self._check_connections()

    def send(self, peer: int, kind: Kind, body: memoryview | None = None, **header: Any) -> None:
        """Send a frame as soon as the socket accepts it. Discard it if the neighbour is not
        connected.
        """
        line = self._connections.get(peer)
        if line is not None:
            self._send(line, kind, body, **header)

    def send_later(
        self, peer: int, kind: Kind, body: memoryview, begins: Callable[[], None], **header: Any
    ) -> None:
        """Send a frame as `send` does. `begins` is called once all earlier frames are sent."""
        line = self._connections.get(peer)
        if line is not None:
            head = pack(kind, self.me, body_bytes=len(body), **header)

            def make() -> list[memoryview]:
                begins()
                return [memoryview(head), body]

            line.connection.send_later(make)

    def reachable(self) -> list[int]:
        """Return the connected neighbours."""
        return list(self._connections)

    def drop(self, peer: int) -> None:
        """Close the connection to a neighbour."""
        if peer in self._connections:
            self._disconnect(self._connections[peer])

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
            line.connection.idle for line in self._connections.values()
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

    # ---- new connections --------------------------------------------------------------------

    def _on_accept(self, sock: socket.socket) -> None:
        self._add(sock, None)
        if len(self._pending) > MAX_PENDING:
            self._disconnect(min(self._pending, key=lambda line: line.connection.sent_s))

    def _connect(self, peer: int) -> None:
        self._tries[peer] += 1
        wait_s = min(RETRY_S * 1.5 ** (self._tries[peer] - 1), MAX_RETRY_S)
        self._retry_at_s[peer] = time.monotonic() + wait_s
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        # If the connection fails later, reading from the socket raises the error.
        if sock.connect_ex(self._addresses[peer]) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        line = self._add(sock, peer)
        # created once the neighbour has proved the secret
        line.connection.send_later(lambda: [memoryview(self._hello(peer))])

    def _add(self, sock: socket.socket, peer: int | None) -> _Peer:
        """Add a connection to a neighbour, or one from an unknown process (None)."""
        connection = Connection(
            sock,
            Kind,
            lambda header: self._buffer(line, header),
            self._secret,
            connects=peer is not None,
        )
        line = _Peer(connection, peer)
        self._pending.add(line)
        self._add_peer(line)
        return line

    def _on_invalid_frame(self, peer: _Peer, error: WireError) -> None:
        with suppress(OSError):
            peer.connection.sock.send(pack(Kind.REFUSED, self.me, meta={"why": str(error)}))
        self._disconnect(peer)

    def _on_connection_error(self, peer: _Peer, error: OSError) -> None:
        self._disconnect(peer)

    def _on_frame(self, peer: _Peer, frame: Frame[Kind]) -> None:
        if frame.header.kind is Kind.REFUSED:
            raise ConnectionResetError(f"it refuses: {frame.meta.get('why')}")
        if peer in self._pending:
            self._introduce(peer, frame)
        else:
            self.receiver.on_frame(frame.header.rank, frame)

    def _hello(self, peer: int) -> bytes:
        return pack(Kind.HELLO, self.me, meta=self.receiver.hello(peer))

    def _introduce(self, line: _Peer, frame: Frame[Kind]) -> None:
        """Process the first frame: a HELLO, or the request of a worker that is not a neighbour."""
        peer = frame.header.rank
        if frame.header.kind in STRANGER_KINDS:
            line.connection.send(*self.answer(frame))
            return
        self.drop(peer)
        if line.peer is None:
            line.connection.send(self._hello(peer))
        self._pending.discard(line)
        line.peer, self._connections[peer], self._tries[peer] = peer, line, 0
        if peer > self.me:
            self._retry_at_s.pop(peer, None)
        else:  # also a worker that has come back with an edge to this one
            self._retry_at_s.setdefault(peer, 0.0)
        self.receiver.on_connect(peer, frame.meta)

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
        return self.receiver.body_buffer(header.rank, header)

    # ---- closed connections -----------------------------------------------------------------

    def _disconnect(self, line: _Peer) -> None:
        if line not in self._peers:
            return
        self._pending.discard(line)
        self._drop(line)
        self._sent_before += line.connection.bytes_sent
        if line.peer is not None and self._connections.get(line.peer) is line:
            del self._connections[line.peer]
            self.receiver.on_disconnect(line.peer)

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
            if now - connection.received_s > self._silent_s:
                self._disconnect(line)
            elif connection.idle and now - connection.sent_s >= self._silent_s / HEARTBEATS:
                self.send(peer, Kind.BEAT)
        for line in list(self._pending):
            if now - line.connection.sent_s > self._silent_s:
                self._disconnect(line)
        for peer, at in list(self._retry_at_s.items()):
            if now >= at and not self._has_connection(peer):
                self._connect(peer)
