"""Client of a membership service that runs as a process of its own."""

from __future__ import annotations

import random
import socket
import threading
import time

from offbeat import __version__
from offbeat.core.transport.addresses import parse_address
from offbeat.frames.connection import NOTHING, Connection
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.frames.secret import FILE_VARIABLE, VARIABLE, ProofError, read_secret
from offbeat.membership.client import Membership
from offbeat.membership.errors import (
    EpochReplacedError,
    MembershipError,
    ProtocolRefusedError,
    RequestRefusedError,
    SecretRefusedError,
    ServiceUnreachableError,
)
from offbeat.membership.protocol import MOST_WAIT_S, PROTOCOL_VERSION, Kind, Refusal
from offbeat.membership.records import Epoch
from offbeat.membership.registry import Command, Reply

ANSWER_S = 5.0  # longest time for a connection, and for an answer beyond the wait of a request
IDLE_S = 20.0  # a connection without a request for this time is not used again
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # between two attempts; each pause is longer than the last
REFUSED_PROOFS = 4  # attempts; a service that ends may close a connection, too

_jitter = random.SystemRandom()  # not the generator of the script


class MembershipClient(Membership):
    """Client that connects when it is first used, and again when a connection has failed.

    Args:
        address: `HOST:PORT` of the service.
        secret: secret of the service; None: that of the environment (`read_secret`).
        timeout_s: longest time in seconds for which a call waits for a service that does not
            answer, for example while it restarts.

    Raises:
        ValueError: the address is malformed, or there is no secret.
        OSError: the file of the secret cannot be read.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None = None,
        timeout_s: float = 60.0,
    ):
        self._host = parse_address(address, "the membership service")
        self.address, self._timeout_s = address, timeout_s
        self._secret = read_secret() if secret is None else secret
        self._idle: list[tuple[Connection[Kind], float]] = []
        self._lock = threading.Lock()

    def request(self, command: Command, wait_s: float = 0.0) -> Reply:
        """See `Membership.request`."""
        now = time.monotonic()
        until_s, answered_s = now + wait_s, now
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            reply = self._repeat(command, min(left_s, MOST_WAIT_S), answered_s + self._timeout_s)
            answered_s = time.monotonic()
            if reply["is_ready"] or answered_s >= until_s:
                return reply

    def close(self) -> None:
        """Close the connections to the service. A later call connects again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _repeat(self, command: Command, wait_s: float, until_s: float) -> Reply:
        """Send a request until it is answered. Raise ServiceUnreachableError after `until_s`."""
        pause_s, refused_proofs = FIRST_PAUSE_S, 0
        while True:
            left_s = max(until_s - time.monotonic(), FIRST_PAUSE_S)
            try:
                return self._exchange(command, wait_s, min(left_s, ANSWER_S))
            except ProofError as error:
                refused_proofs += 1
                if refused_proofs >= REFUSED_PROOFS:
                    raise SecretRefusedError(
                        f"the membership service at {self.address} does not accept the secret of "
                        f"this process; {FILE_VARIABLE} or {VARIABLE} must hold that of the "
                        "service"
                    ) from error
                cause: Exception = error
            except MembershipError as error:
                if not isinstance(error, ServiceUnreachableError):
                    raise
                cause = error
            except WireError as error:
                raise ProtocolRefusedError(
                    f"the program at {self.address} does not answer as a membership service "
                    f"({error}); give the address that `offbeat membership` has printed, and "
                    "install versions of offbeat with one protocol"
                ) from error
            except OSError as error:
                cause = error
            if time.monotonic() + pause_s > until_s:
                raise ServiceUnreachableError(
                    f"the membership service at {self.address} has not answered for "
                    f"{self._timeout_s:g} s ({cause}); start it again with the same journal: "
                    "offbeat membership --journal FILE"
                ) from cause
            time.sleep(pause_s * _jitter.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _exchange(self, command: Command, wait_s: float, limit_s: float) -> Reply:
        """Send a request once, over an idle connection if one still works, and return its reply."""
        request = pack(Kind.REQUEST, 0, meta={"command": command, "wait_s": wait_s})
        while (connection := self._take_idle()) is not None:
            try:
                return self._send_request(connection, request, wait_s + limit_s)
            except TimeoutError:
                raise
            except OSError:  # the service has closed it; the request is repeatable
                continue
        return self._send_request(self._connect(limit_s), request, wait_s + limit_s)

    def _send_request(self, connection: Connection[Kind], request: bytes, limit_s: float) -> Reply:
        try:
            connection.send(request)
            frame = connection.await_frame(limit_s)
            if frame.header.kind not in (Kind.REPLY, Kind.REFUSED):
                raise WireError(f"{frame.header.kind.name} is not expected now")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append((connection, time.monotonic()))
        if frame.header.kind is Kind.REFUSED:
            raise self._error(frame)
        return frame.meta

    def _take_idle(self) -> Connection[Kind] | None:
        fresh_s = time.monotonic() - IDLE_S
        with self._lock:
            stale = [connection for connection, since_s in self._idle if since_s < fresh_s]
            self._idle = [one for one in self._idle if one[1] >= fresh_s]
            found = self._idle.pop()[0] if self._idle else None
        for connection in stale:
            connection.close()
        return found

    def _connect(self, limit_s: float) -> Connection[Kind]:
        """Return a connection after the proof of the secret and the comparison of versions."""
        sock = socket.create_connection(self._host, timeout=limit_s)
        connection: Connection[Kind] = Connection(sock, Kind, _room, self._secret, connects=True)
        try:
            if sock.getsockname() == sock.getpeername():
                # TCP connects a socket to itself if the system has chosen the port of the service
                # for it. The service could not start again while it is open.
                raise ConnectionRefusedError("no service listens at its port")
            own = {"protocol": PROTOCOL_VERSION, "offbeat": __version__}
            connection.send(pack(Kind.HELLO, 0, meta=own))
            frame = connection.await_frame(limit_s)
            if frame.header.kind is Kind.REFUSED:
                raise self._error(frame)
            if frame.header.kind is not Kind.WELCOME:
                raise WireError(f"{frame.header.kind.name} is not expected now")
        except BaseException:
            connection.close()
            raise
        return connection

    def _error(self, frame: Frame[Kind]) -> MembershipError:
        """Return the error that a REFUSED frame states."""
        cause, why = frame.meta.get("cause"), str(frame.meta.get("why"))
        if cause in (Refusal.PROTOCOL, Refusal.FRAME):
            return ProtocolRefusedError(f"the membership service at {self.address}: {why}")
        if cause == Refusal.REPLACED:
            return EpochReplacedError(frame.meta["number"], Epoch.from_dict(frame.meta["epoch"]))
        if cause == Refusal.JOURNAL:
            return ServiceUnreachableError(why)
        return RequestRefusedError(why)


def _room(_: Header[Kind]) -> tuple[None, memoryview]:
    return None, NOTHING
