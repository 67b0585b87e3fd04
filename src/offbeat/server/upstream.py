"""A worker's connection to one server, with handshake and reconnection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.frames.connection import NOTHING, Connection
from offbeat.frames.frames import Header, WireError, pack
from offbeat.frames.secret import ProofError
from offbeat.server.layout import ShardSpec
from offbeat.server.protocol import Kind

RETRY_EVERY_S = 0.2

Room = Callable[["Upstream", Header], tuple[Any, memoryview]]


class RefusedError(RuntimeError):
    """The server refuses this worker. Another attempt would fail, too."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Identity of a worker: its rank, the job's secret, and the digest of its layout."""

    rank: int
    secret: bytes
    layout: str


class Upstream:
    """Connection to one server, and the state that outlasts a broken connection.

    `push_clock` is the clock of the latest push on this server, which may lag behind the client's.
    """

    def __init__(self, name: str, address: tuple[str, int], shards: tuple[ShardSpec, ...]):
        self.name, self.address, self.shards = name, address, shards
        self.push_clock = 0
        self.failures = 0  # broken connections since the last frame
        self.connection: Connection | None = None
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all connections so far."""
        return self._sent_before + (self.connection.bytes_sent if self.connection else 0)

    def connect(
        self, me: WorkerIdentity, clock: int, fresh: bool, room: Room, limit_s: float
    ) -> tuple[int, dict[int, int]]:
        """Connect, exchange proofs of the secret, and announce this worker's clock.

        Retries every `RETRY_EVERY_S` for `limit_s` seconds, then raises ConnectionError. `fresh`: a
        new process of the rank. `room` returns the buffer of each later frame's body. Returns the
        clock of the next push, and by shard number the clock after the last push on the server.
        """
        end = time.monotonic() + limit_s
        while True:
            left = max(end - time.monotonic(), 0.1)
            try:
                return self._connect(me, clock, fresh, room, left)
            except OSError as error:
                if time.monotonic() + RETRY_EVERY_S > end:
                    raise ConnectionError(f"{self}: {error}") from error
                time.sleep(RETRY_EVERY_S)

    def _connect(
        self, me: WorkerIdentity, clock: int, fresh: bool, room: Room, limit_s: float
    ) -> tuple[int, dict[int, int]]:
        self.close()
        sock = socket.create_connection(self.address, timeout=limit_s)

        def body_buffer(header: Header) -> tuple[Any, memoryview]:
            return room(self, header) if self.connection is connection else (None, NOTHING)

        connection = Connection(sock, Kind, body_buffer, me.secret, connects=True)
        meta = {"fresh": fresh, "layout": me.layout}
        connection.send(pack(Kind.HELLO, me.rank, clock=clock, meta=meta))
        try:
            frame = connection.await_frame(limit_s)
            if frame.header.kind is not Kind.WELCOME:
                raise RefusedError(f"{self} refuses this rank: {frame.meta.get('why')}")
        except (ProofError, WireError) as error:
            connection.close()
            raise RefusedError(f"{self}: {error}") from None
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        taken = {int(number): clock for number, clock in frame.meta["taken"].items()}
        return frame.header.clock, taken

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self.connection is not None:
            self._sent_before += self.connection.bytes_sent
            self.connection.close()
            self.connection = None

    def __str__(self) -> str:
        return f"{self.name} at {self.address[0]}:{self.address[1]}"
