"""Membership service: sockets, proof of the secret, requests, limits of strangers and of time."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import choice
from typing import Any

from offbeat import __version__
from offbeat.frames.connection import NOTHING, Connection, ConnectionLoop
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.frames.secret import read_secret
from offbeat.membership.errors import EpochReplacedError, RequestRefusedError
from offbeat.membership.journal import Journal
from offbeat.membership.ledger import JournalError, Ledger
from offbeat.membership.protocol import MOST_WAIT_S, PROTOCOL_VERSION, Kind, Refusal
from offbeat.membership.registry import Command

GREETING_S = 10.0  # a connection without proof and HELLO for this time is closed
IDLE_S = 60.0  # a connection without a request for this time is closed
ENDING_S = 5.0  # time for the other end of a refused connection to read the refusal
MOST_STRANGERS = 256  # connections without proof and HELLO
MOST_CONNECTIONS = 1024
OTHER_DESCRIPTORS = 64  # of the process, beside those of connections
MOST_HELLO_BYTES = 4096
BACKLOG = 128
TURN_S = 0.25  # longest time of one wait for sockets
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close without a wait, the other end sees a reset


@dataclass(eq=False)
class _Peer:
    """A connected process.

    Attributes:
        connection: its connection.
        host: its address.
        since_s: monotonic time of the connection, or of its last complete request.
        is_known: whether it has proved the secret and its protocol version.
        is_ending: whether it has got a refusal that ends the connection.
        waiting: command whose condition does not hold yet.
        until_s: monotonic time at which the wait of that command ends.
    """

    connection: Connection[Kind]
    host: str
    since_s: float = field(default_factory=time.monotonic)
    is_known: bool = False
    is_ending: bool = False
    waiting: Command | None = None
    until_s: float = 0.0


class MembershipService(ConnectionLoop[_Peer]):
    """Serves a ledger to the members of a job.

    Args:
        ledger: state and journal.
        listener: socket on which members connect.
        secret: secret of the members; None: that of the environment (`read_secret`).
        report: called with a text for each new epoch.

    Attributes:
        address: `HOST:PORT` of the listener.
    """

    def __init__(
        self,
        ledger: Ledger,
        listener: socket.socket,
        secret: bytes | None = None,
        report: Callable[[str], object] | None = None,
    ):
        super().__init__(0, listener)
        self._ledger, self._secret = ledger, read_secret() if secret is None else secret
        self._most_connections = max(1, min(MOST_CONNECTIONS, _open_files() - OTHER_DESCRIPTORS))
        self._most_strangers = max(1, min(MOST_STRANGERS, self._most_connections // 2))
        self._answered_changes = 0
        self._closing = False
        self._report = report or (lambda _: None)
        self._reported = self.summary
        host, port, *_ = listener.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def summary(self) -> str:
        """Text that names the newest epoch and the number of its members."""
        epoch = self._ledger.registry.state.epoch
        if epoch is None:
            return "no epoch yet"
        return f"epoch {epoch.number} with {len(epoch.members)} members"

    def serve(self) -> None:
        """Serve until `stop` is called."""
        try:
            while not self._closing:
                self.handle_events(TURN_S)
        finally:
            self.close()

    def stop(self) -> None:
        """End `serve`. Any thread may call this method."""
        self._closing = True
        self.wake()

    def handle_events(self, wait_s: float) -> None:
        """Wait for at most `wait_s` seconds for events, and process them and elapsed times."""
        now = time.monotonic()
        due_s = min((peer.until_s for peer in self._peers if peer.waiting), default=math.inf)
        self._process_sockets(min(wait_s, max(0.0, due_s - now)))
        with suppress(JournalError):  # repeated at the next call; the next command reports it
            self._ledger.withdraw_expired()
        self._answer_waiting()
        self._close_overdue()

    def close(self) -> None:
        """Close all sockets and the journal."""
        super().close()
        self._ledger.close()

    # ---- connections ------------------------------------------------------------------------

    def _on_accept(self, sock: socket.socket) -> None:
        try:
            host = str(sock.getpeername()[0])
            connection = Connection(
                sock, Kind, lambda header: self._room(peer, header), self._secret, connects=False
            )
        except OSError:  # the other end has closed the connection
            sock.close()
            return
        peer = _Peer(connection, host)
        self._add_peer(peer)
        self._limit_connections()

    def _limit_connections(self) -> None:
        """Close connections above a limit. Members connect again when they need it."""
        strangers = [peer for peer in self._peers if not peer.is_known]
        if len(strangers) > self._most_strangers:
            # The host with the most of them cannot exclude other hosts. Of its connections a random
            # one is closed: the oldest one may be a member that answers slowly.
            counts = Counter(peer.host for peer in strangers)
            most = max(counts.values())
            self._reset(choice([peer for peer in strangers if counts[peer.host] == most]))
        if len(self._peers) > self._most_connections:
            idle = [peer for peer in self._peers if peer.waiting is None]
            self._reset(_oldest(idle or self._peers))

    def _on_invalid_frame(self, peer: _Peer, error: WireError) -> None:
        self._refuse(peer, Refusal.FRAME, str(error), ends=True)

    def _reset(self, peer: _Peer) -> None:
        """Close a connection such that the other end sees no refusal of its secret."""
        peer.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._drop(peer)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers):
            limit_s = IDLE_S if peer.is_known else GREETING_S
            if peer.is_ending:
                limit_s = ENDING_S
            if peer.waiting is None and now - peer.since_s > limit_s:
                self._reset(peer)

    # ---- requests ---------------------------------------------------------------------------

    def _room(self, peer: _Peer, header: Header[Kind]) -> tuple[None, memoryview]:
        expected = Kind.REQUEST if peer.is_known else Kind.HELLO
        if header.kind is not expected:
            raise WireError(f"{header.kind.name} is not expected now")
        if not peer.is_known and header.meta_bytes > MOST_HELLO_BYTES:
            raise WireError(f"HELLO ({header.meta_bytes} bytes) must have {MOST_HELLO_BYTES}")
        if peer.waiting is not None or not peer.connection.idle:
            raise WireError("a request is not allowed before the reply to the last one")
        return None, NOTHING

    def _on_frame(self, peer: _Peer, frame: Frame[Kind]) -> None:
        if not peer.is_known:
            self._welcome(peer, frame)
            return
        peer.since_s = time.monotonic()
        wait_s = frame.meta.get("wait_s", 0)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s >= 0:
            raise WireError("wait_s must be a number of seconds")
        peer.until_s = peer.since_s + min(wait_s, MOST_WAIT_S)
        self._execute(peer, frame.meta.get("command"))

    def _welcome(self, peer: _Peer, frame: Frame[Kind]) -> None:
        protocol = frame.meta.get("protocol")
        if protocol != PROTOCOL_VERSION:
            why = (
                f"protocol ({str(protocol)[:20]}) of offbeat {str(frame.meta.get('offbeat'))[:20]} "
                f"must be {PROTOCOL_VERSION}, that of offbeat {__version__} of the service; "
                "install a version with this protocol"
            )
            self._refuse(peer, Refusal.PROTOCOL, why, ends=True)
            return
        peer.is_known, peer.since_s = True, time.monotonic()
        meta = {"protocol": PROTOCOL_VERSION, "offbeat": __version__}
        self._send(peer, Kind.WELCOME, meta=meta)

    def _execute(self, peer: _Peer, command: Any) -> None:
        """Answer a command, or keep it until its condition holds or its wait ends."""
        peer.waiting = None
        try:
            answer = self._ledger.execute(command)
        except EpochReplacedError as error:
            more = {"number": error.number, "epoch": error.epoch.to_dict()}
            self._refuse(peer, Refusal.REPLACED, str(error), **more)
        except RequestRefusedError as error:
            self._refuse(peer, Refusal.REQUEST, str(error))
        except JournalError as error:
            self._refuse(peer, Refusal.JOURNAL, str(error))
        else:
            if answer.commit is not None and self.summary != self._reported:
                self._reported = self.summary
                self._report(self._reported)  # before the reply, so that an exit loses no line
            if not answer.is_ready and time.monotonic() < peer.until_s:
                peer.waiting = command
                return
            self._send(peer, Kind.REPLY, meta={**answer.reply, "is_ready": answer.is_ready})

    def _refuse(
        self, peer: _Peer, cause: str, why: str, *, ends: bool = False, **more: Any
    ) -> None:
        meta = {"cause": cause, "why": why, **more}
        if ends:
            peer.is_ending, peer.waiting, peer.since_s = True, None, time.monotonic()
            peer.connection.end(pack(Kind.REFUSED, self.me, meta=meta))
        else:
            self._send(peer, Kind.REFUSED, meta=meta)

    def _answer_waiting(self) -> None:
        """Answer the commands whose condition may hold now, and those whose wait has ended."""
        changes, now = self._ledger.registry.changes, time.monotonic()
        has_changed, self._answered_changes = changes != self._answered_changes, changes
        for peer in [peer for peer in self._peers if peer.waiting is not None]:
            if has_changed or now >= peer.until_s:
                self._execute(peer, peer.waiting)


def _oldest(peers: Iterable[_Peer]) -> _Peer:
    return min(peers, key=lambda peer: peer.since_s)


def _open_files() -> int:
    """Return the largest number of descriptors of this process."""
    import resource  # not on Windows, where offbeat can plan and simulate only

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_service(
    journal: Path,
    host: str,
    port: int,
    secret: bytes | None = None,
    report: Callable[[str], object] | None = None,
) -> MembershipService:
    """Return the service of a journal, which listens at an address.

    Args:
        journal: file of the journal.
        host: address or name of a local interface.
        port: port; 0 selects a free one.
        secret: see `MembershipService`.
        report: see `MembershipService`.

    Raises:
        ValueError: there is no secret, the journal is damaged or open in another service, or the
            address cannot be used.
        OSError: the journal cannot be opened.
    """
    secret = read_secret() if secret is None else secret
    ledger = Ledger(Journal(journal))
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        ledger.close()
        raise ValueError(
            f"address ({host}:{port}) must be one of this host with a free port: "
            f"{error.strerror or error}; give another --host or --port"
        ) from None
    return MembershipService(ledger, listener, secret, report)
