"""The service: one server's sockets, and what it does with the frames that arrive."""

from __future__ import annotations

import math
import selectors
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.frames import secret as secrets
from offbeat.frames.connection import Connection, Views
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.server.optimizers import checked_settings, packed_state
from offbeat.server.parameters import Shard
from offbeat.server.protocol import Kind
from offbeat.server.snapshots import Snapshots
from offbeat.server.store import Store

GREETING_S = 10.0  # for a stranger to prove that it is none
MOST_STRANGERS = 64
MOST_MEETING_BYTES = 64 << 20
NOTHING = memoryview(b"")


@dataclass(eq=False)
class _Peer:
    """Who is at the other end: a stranger until `connection` exists, then a worker."""

    sock: socket.socket
    came_s: float
    nonce: bytes = field(default_factory=secrets.nonce)
    answer: bytearray = field(default_factory=bytearray)
    connection: Connection | None = None
    rank: int | None = None
    started: bool = False
    need: int | None = None  # of a pull that waits


class Service:
    """Serves a store to its workers until all of them have left.

    A worker that has not been heard of for `silent_s` counts no more, with a warning; it may come
    back.
    """

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        secret: bytes,
        *,
        silent_s: float,
        snapshots: Snapshots | None = None,
    ):
        self.store = store
        self._listener, self._secret = listener, secret
        self._silent_s, self._snapshots = silent_s, snapshots
        self._peers: set[_Peer] = set()
        now = time.monotonic()
        self._heard_s = dict.fromkeys(store.clocks(), now)
        self._lost: set[int] = set()
        self._meeting: dict[int, tuple[int, Tensor]] = {}  # by rank: its how many-th, its numbers
        self._met_last: dict[int, tuple[int, Tensor]] = {}  # the same of what came out
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._handlers: dict[Kind, Callable[[_Peer, Frame], None]] = {
            Kind.HELLO: self._hello,
            Kind.START: self._start,
            Kind.PUSH: self._push,
            Kind.SKIP: self._skip,
            Kind.PULL: self._pull,
            Kind.HURRY: self._hurry,
            Kind.BEAT: lambda *_: None,
            Kind.STATUS: self._status,
            Kind.MEET: self._meet,
            Kind.STATE: self._state,
            Kind.BYE: self._bye,
        }

    def serve(self) -> None:
        """Until every worker has left. RuntimeError if all of them have gone without a word."""
        try:
            while self.store.clocks():
                self.turn(min(1.0, self._silent_s / 4))
        finally:
            self.close()
        if self._lost and self._lost == set(self._heard_s):
            raise RuntimeError(
                f"every worker has gone without a word (rank {_numbers(self._lost)}); see their "
                "logs"
            )

    def turn(self, wait_s: float) -> None:
        """Handle what has arrived within `wait_s`, and see who is silent."""
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
                continue
            peer: _Peer = key.data
            if events & selectors.EVENT_READ:
                self._read(peer)
            if events & selectors.EVENT_WRITE:
                self._write(peer)
        self._count_out()

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        self._listener.close()

    # ---- sockets ----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        sock.setblocking(False)
        peer = _Peer(sock, time.monotonic())
        try:
            sock.send(peer.nonce)
        except OSError:
            sock.close()
            return
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        strangers = [p for p in self._peers if p.connection is None]
        if len(strangers) > MOST_STRANGERS:
            self._drop(min(strangers, key=lambda p: p.came_s))

    def _read(self, peer: _Peer) -> None:
        try:
            if peer.connection is None:
                self._greet(peer)
                return
            for frame in peer.connection.receive():
                if peer not in self._peers:
                    return
                self._handle(peer, frame)
        except WireError as error:
            self._refuse(peer, str(error))
        except OSError:
            self._drop(peer)

    def _greet(self, peer: _Peer) -> None:
        """Read the stranger's answer to the nonce, and nothing but that."""
        data = peer.sock.recv(secrets.ANSWER_BYTES - len(peer.answer))
        if not data:
            raise ConnectionResetError
        peer.answer += data
        if len(peer.answer) < secrets.ANSWER_BYTES:
            return
        theirs = secrets.is_ours(self._secret, peer.nonce, bytes(peer.answer))
        if theirs is None:
            self._drop(peer)
            return
        peer.connection = Connection(peer.sock, Kind, lambda header: self._room(peer, header))
        peer.connection.send(secrets.proof(self._secret, b"server", theirs, peer.nonce))
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        """Send what there is; be called again only where some is left."""
        if peer not in self._peers or peer.connection is None:
            return
        try:
            peer.connection.flush()
        except OSError:
            self._drop(peer)
            return
        if peer.connection.events != self._selector.get_key(peer.sock).events:
            self._selector.modify(peer.sock, peer.connection.events, peer)

    def _send(self, peer: _Peer, kind: Kind, body: memoryview | None = None, **header: Any) -> None:
        assert peer.connection is not None
        size = 0 if body is None else len(body)
        peer.connection.send(pack(kind, peer.rank or 0, body_bytes=size, **header), body)
        self._write(peer)

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._send(peer, Kind.REFUSED, meta={"why": why})
        with suppress(OSError):  # unread bytes would make closing take the words back
            peer.sock.shutdown(socket.SHUT_WR)
            while peer.sock.recv(1 << 20):
                pass
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.sock)
            peer.sock.close()

    # ---- frames -----------------------------------------------------------------------------

    def _room(self, peer: _Peer, header: Header) -> tuple[Any, memoryview]:
        """Where a frame's body goes; WireError unless the worker may say this now."""
        kind = header.kind
        expected = (
            [Kind.HELLO]
            if peer.rank is None
            else [Kind.START]
            if not peer.started
            else [kind for kind in self._handlers if kind not in (Kind.HELLO, Kind.START)]
        )
        if kind not in expected:
            raise WireError(f"{kind.name} is not expected now")
        if peer.rank is not None and header.rank != peer.rank:
            raise WireError(f"rank ({header.rank}) must be {peer.rank}")
        if kind in (Kind.PUSH, Kind.SKIP, Kind.STATE):
            shard = self.store.shards.get(header.shard)
            if shard is None:
                raise WireError(f"shard ({header.shard}) is not on this server")
            if kind is Kind.STATE:
                return None, NOTHING
            if header.clock > shard.clocks[header.rank]:
                raise WireError(f"clock ({header.clock}) must be {shard.clocks[header.rank]}")
            if kind is Kind.PUSH:
                if header.body_bytes != shard.spec.bytes:
                    raise WireError(
                        f"body ({header.body_bytes} bytes) must have {shard.spec.bytes}"
                    )
                gradient = torch.empty(
                    shard.spec.stop - shard.spec.start, dtype=shard.spec.dtype, device="cpu"
                )
                return gradient, memory_of(gradient)
        if kind is Kind.MEET:
            if header.body_bytes > MOST_MEETING_BYTES or header.body_bytes % 8:
                raise WireError(f"body ({header.body_bytes} bytes) cannot be")
            numbers = torch.empty(header.body_bytes // 8, dtype=torch.float64, device="cpu")
            return numbers, memory_of(numbers)
        return None, NOTHING

    def _handle(self, peer: _Peer, frame: Frame) -> None:
        if peer.rank is not None:
            self._heard_s[peer.rank] = time.monotonic()
        self._handlers[frame.header.kind](peer, frame)

    def _hello(self, peer: _Peer, frame: Frame) -> None:
        rank, meta = frame.header.rank, frame.meta
        if rank not in self._heard_s:
            raise WireError(f"rank ({rank}) is no worker of this job")
        if meta.get("layout") != self.store.layout.digest:
            raise WireError("the model or optimizer is another one than the server's")
        for other in [p for p in self._peers if p.rank == rank]:
            self._drop(other)
        peer.rank = rank
        if meta.get("fresh"):
            self._met_last.pop(rank, None)
        self._heard_s[rank] = time.monotonic()
        clock = self.store.welcome(rank, frame.header.clock, bool(meta.get("fresh")))
        taken = {str(number): clock for number, clock in self.store.taken(rank).items()}
        self._send(peer, Kind.WELCOME, clock=clock, meta={"taken": taken})

    def _start(self, peer: _Peer, frame: Frame) -> None:
        rank = frame.header.rank
        peer.started = True
        if rank in self._lost:
            self._lost.remove(rank)
            self._say(f"rank {rank} is back and goes on from clock {frame.header.clock}")
        self.store.join(rank, frame.header.clock)
        self._moved()

    def _push(self, peer: _Peer, frame: Frame) -> None:
        header, shard = frame.header, self._shard(frame)
        settings = checked_settings(frame.meta.get("settings"), self.store.optimizer)
        absent = frame.meta.get("absent", [])
        if not isinstance(absent, list) or not all(isinstance(p, int) for p in absent):
            raise WireError("absent must be a list of parameters")
        shard.push(header.rank, header.clock, frame.body, settings, frozenset(absent))
        self._taken(peer, header)

    def _skip(self, peer: _Peer, frame: Frame) -> None:
        self._shard(frame).skip(frame.header.rank, frame.header.clock)
        self._taken(peer, frame.header)

    def _taken(self, peer: _Peer, header: Header) -> None:
        self._send(peer, Kind.TAKEN, shard=header.shard, clock=header.clock)
        self._moved()

    def _shard(self, frame: Frame) -> Shard:
        return self.store.shards[frame.header.shard]

    def _pull(self, peer: _Peer, frame: Frame) -> None:
        peer.need = frame.header.clock
        self._answer(peer, self.store.low)

    def _hurry(self, peer: _Peer, frame: Frame) -> None:
        if peer.need is not None:
            peer.need = 0
            self._answer(peer, self.store.low)

    def _moved(self) -> None:
        """Clocks have moved: pulls that waited are answered, and a snapshot may be due."""
        low = self.store.low
        for peer in [p for p in self._peers if p.need is not None]:
            self._answer(peer, low)
        if self._snapshots is not None:
            self._snapshots.due(low, self.store)

    def _answer(self, peer: _Peer, low: float) -> None:
        if peer.need is None or low < peer.need:
            return
        clock = peer.need if math.isinf(low) else int(low)
        peer.need = None
        assert peer.connection is not None
        for shard in self.store.shards.values():
            peer.connection.later(lambda shard=shard: self._parameters(peer, shard, clock))
        self._write(peer)

    @staticmethod
    def _parameters(peer: _Peer, shard: Shard, clock: int) -> Views:
        head = pack(
            Kind.PARAMETERS,
            peer.rank or 0,
            shard=shard.spec.number,
            clock=clock,
            body_bytes=shard.spec.bytes,
        )
        return [memoryview(head), memory_of(shard.parameters.clone())]

    def _status(self, peer: _Peer, frame: Frame) -> None:
        now = time.monotonic()
        clocks = {
            str(rank): [clock, round(now - self._heard_s[rank], 1)]
            for rank, clock in self.store.clocks().items()
        }
        self._send(peer, Kind.CLOCKS, meta={"clocks": clocks})

    def _meet(self, peer: _Peer, frame: Frame) -> None:
        rank, number = frame.header.rank, frame.header.clock
        last, mean = self._met_last.get(rank, (0, None))
        if number == last and mean is not None:  # the answer was lost with its connection
            self._send(peer, Kind.MET, memory_of(mean))
            return
        if any(len(numbers) != len(frame.body) for _, numbers in self._meeting.values()):
            raise WireError("the numbers to average must be as many on all workers")
        self._meeting[rank] = number, frame.body
        self._met()

    def _met(self) -> None:
        present = set(self._meeting)
        if not present or not present >= set(self.store.clocks()):
            return
        mean = torch.stack([self._meeting[rank][1] for rank in sorted(present)]).mean(dim=0)
        self._met_last |= {rank: (number, mean) for rank, (number, _) in self._meeting.items()}
        self._meeting = {}
        for peer in [p for p in self._peers if p.rank in present and p.started]:
            self._send(peer, Kind.MET, memory_of(mean))

    def _state(self, peer: _Peer, frame: Frame) -> None:
        shard = self._shard(frame)
        described, runs = packed_state(shard.optimizer, shard.pieces)
        numbers = [run.view(torch.uint8) for run in runs]
        body = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.uint8, device="cpu")
        self._send(
            peer,
            Kind.STATE_IS,
            memory_of(body),
            shard=shard.spec.number,
            meta={"values": described},
        )

    def _bye(self, peer: _Peer, frame: Frame) -> None:
        self._drop(peer)
        self._leave(frame.header.rank)

    # ---- who counts -------------------------------------------------------------------------

    def _count_out(self) -> None:
        now = time.monotonic()
        for peer in [p for p in self._peers if p.rank is None]:
            if now - peer.came_s > GREETING_S:
                self._drop(peer)
        for rank, clock in self.store.clocks().items():
            if now - self._heard_s[rank] <= self._silent_s:
                continue
            for peer in [p for p in self._peers if p.rank == rank]:
                self._drop(peer)
            self._lost.add(rank)
            self._leave(rank)
            self._say(
                f"rank {rank} has not been heard of for {self._silent_s:g} s: its clock ({clock}) "
                f"stops counting; {len(self.store.clocks())} workers go on"
            )

    def _leave(self, rank: int) -> None:
        self.store.leave(rank)
        self._meeting.pop(rank, None)
        self._moved()
        self._met()

    def _say(self, words: str) -> None:
        warnings.warn(f"server {self.store.server}: {words}", RuntimeWarning, stacklevel=3)


def _numbers(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
