"""Service of a parameter server: sockets, handshake, frame handlers, removal of silent workers."""

from __future__ import annotations

import math
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.frames.connection import NOTHING, Connection, ConnectionLoop
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.server.optimizers import checked_settings, packed_state
from offbeat.server.parameters import Shard, Store
from offbeat.server.protocol import Kind
from offbeat.server.snapshots import Snapshots

GREETING_S = 10.0  # a connection without handshake and HELLO for this time is closed
MOST_STRANGERS = 64  # largest number of connections without handshake; then the oldest is closed
MOST_MEETING_BYTES = 64 << 20


@dataclass(eq=False)
class _Peer:
    """A connected process. `rank` is known after HELLO, and `started` is set by START."""

    connection: Connection[Kind]
    rank: int | None = None
    started: bool = False
    need: int | None = None  # clock that the waiting pull requires


class Service(ConnectionLoop[_Peer]):
    """Serves a store to its workers until all of them have left.

    A worker from which no frame arrives for `silent_s` seconds is removed with a warning. It may
    connect again and continue.
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
        super().__init__(store.server, listener)
        self.store, self._secret = store, secret
        self._silent_s, self._snapshots = silent_s, snapshots
        now = time.monotonic()
        self._last_frame_s = dict.fromkeys(store.clocks(), now)
        self._silent: set[int] = set()
        self._waiting_averages: dict[
            int, tuple[int, Tensor]
        ] = {}  # by rank: number of the average, values
        self._last_averages: dict[int, tuple[int, Tensor]] = {}  # by rank: its last one, result
        self._handlers: dict[Kind, Callable[[_Peer, Frame], None]] = {
            Kind.HELLO: self._hello,
            Kind.START: self._start,
            Kind.PUSH: self._push,
            Kind.SKIP: self._skip,
            Kind.PULL: self._pull,
            Kind.BEAT: lambda *_: None,
            Kind.STATUS: self._status,
            Kind.MEET: self._average,
            Kind.STATE: self._state,
            Kind.BYE: self._bye,
        }

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open. Any thread may read it."""
        return len(self._peers) > 0

    def serve(self) -> None:
        """Serve until no worker is left. RuntimeError if all workers were removed as silent."""
        try:
            while self.store.clocks():
                self.handle_events(min(1.0, self._silent_s / 4))
        finally:
            self.close()
        if self._silent and self._silent == set(self._last_frame_s):
            raise RuntimeError(
                f"all workers have stopped responding (rank {_numbers(self._silent)}); see their "
                "logs"
            )

    def handle_events(self, wait_s: float) -> None:
        """Wait up to `wait_s` for socket events, handle them, and remove silent workers."""
        self._process_sockets(wait_s)
        self._remove_silent_workers()

    # ---- sockets ----------------------------------------------------------------------------

    def _on_accept(self, sock: socket.socket) -> None:
        connection = Connection(
            sock, Kind, lambda header: self._body_buffer(peer, header), self._secret, connects=False
        )
        peer = _Peer(connection)
        self._add_peer(peer)
        strangers = [p for p in self._peers if not p.connection.is_proved]
        if len(strangers) > MOST_STRANGERS:
            self._drop(min(strangers, key=lambda p: p.connection.sent_s))

    def _on_invalid_frame(self, peer: _Peer, error: WireError) -> None:
        peer.rank, peer.need = None, None  # the connection ends; the worker may connect again
        peer.connection.end(pack(Kind.REFUSED, self.me, meta={"why": str(error)}))

    # ---- frames -----------------------------------------------------------------------------

    def _body_buffer(self, peer: _Peer, header: Header) -> tuple[Any, memoryview]:
        """Return (body, its memory) for a frame. WireError if the frame is not allowed now."""
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
                raise WireError(
                    f"body ({header.body_bytes} bytes) must be a multiple of 8 below 64 MiB"
                )
            numbers = torch.empty(header.body_bytes // 8, dtype=torch.float64, device="cpu")
            return numbers, memory_of(numbers)
        return None, NOTHING

    def _on_frame(self, peer: _Peer, frame: Frame) -> None:
        if peer.rank is not None:
            self._last_frame_s[peer.rank] = time.monotonic()
        self._handlers[frame.header.kind](peer, frame)

    def _hello(self, peer: _Peer, frame: Frame) -> None:
        rank, meta = frame.header.rank, frame.meta
        if rank not in self._last_frame_s:
            raise WireError(f"rank ({rank}) is no worker of this job")
        if meta.get("layout") != self.store.layout.digest:
            raise WireError("model and optimizer must be the same as on the server")
        for other in [p for p in self._peers if p.rank == rank]:
            self._drop(other)
        peer.rank = rank
        if meta.get("fresh"):
            self._last_averages.pop(rank, None)
        self._last_frame_s[rank] = time.monotonic()
        clock = self.store.welcome(rank, frame.header.clock, bool(meta.get("fresh")))
        taken = {str(number): clock for number, clock in self.store.next_clocks(rank).items()}
        self._send(peer, Kind.WELCOME, clock=clock, meta={"taken": taken})

    def _start(self, peer: _Peer, frame: Frame) -> None:
        rank = frame.header.rank
        peer.started = True
        if rank in self._silent:
            self._silent.remove(rank)
            self._warn(f"rank {rank} has reconnected and continues from clock {frame.header.clock}")
        self.store.join(rank, frame.header.clock)
        self._on_clock_change()

    def _push(self, peer: _Peer, frame: Frame) -> None:
        header, shard = frame.header, self._shard(frame)
        settings = checked_settings(frame.meta.get("settings"), self.store.optimizer)
        absent = frame.meta.get("absent", [])
        if not isinstance(absent, list) or not all(isinstance(p, int) for p in absent):
            raise WireError("absent must be a list of parameters")
        shard.push(header.rank, header.clock, frame.body, settings, frozenset(absent))
        self._acknowledge(peer, header)

    def _skip(self, peer: _Peer, frame: Frame) -> None:
        self._shard(frame).skip(frame.header.rank, frame.header.clock)
        self._acknowledge(peer, frame.header)

    def _acknowledge(self, peer: _Peer, header: Header) -> None:
        self._send(peer, Kind.TAKEN, shard=header.shard, clock=header.clock)
        self._on_clock_change()

    def _shard(self, frame: Frame) -> Shard:
        """Return the shard of a push, with the clock of its worker: another server may have removed
        the worker meanwhile, and have given it a later clock."""
        shard, header = self.store.shards[frame.header.shard], frame.header
        if (
            header.kind in (Kind.PUSH, Kind.SKIP)
            and header.clock > shard.clocks.present[header.rank]
        ):
            shard.join(header.rank, header.clock)
        return shard

    def _pull(self, peer: _Peer, frame: Frame) -> None:
        peer.need = frame.header.clock
        self._answer(peer, self.store.lowest_clock)

    def _on_clock_change(self) -> None:
        """Answer waiting pulls and save a due snapshot, after clocks have changed."""
        low = self.store.lowest_clock
        for peer in [p for p in self._peers if p.need is not None]:
            self._answer(peer, low)
        if self._snapshots is not None:
            self._snapshots.save_if_due(low, self.store)

    def _answer(self, peer: _Peer, low: float) -> None:
        if peer.need is None or low < peer.need:
            return
        clock = peer.need if math.isinf(low) else int(low)
        peer.need = None
        for shard in self.store.shards.values():
            peer.connection.send_later(lambda shard=shard: self._parameters(shard, clock))

    def _parameters(self, shard: Shard, clock: int) -> list[memoryview]:
        head = pack(
            Kind.PARAMETERS,
            self.me,
            shard=shard.spec.number,
            clock=clock,
            body_bytes=shard.spec.bytes,
        )
        return [memoryview(head), memory_of(shard.parameters.clone())]

    def _status(self, peer: _Peer, frame: Frame) -> None:
        now = time.monotonic()
        clocks = {
            str(rank): [clock, round(now - self._last_frame_s[rank], 1)]
            for rank, clock in self.store.clocks().items()
        }
        self._send(peer, Kind.CLOCKS, meta={"clocks": clocks})

    def _average(self, peer: _Peer, frame: Frame) -> None:
        rank, number = frame.header.rank, frame.header.clock
        last, mean = self._last_averages.get(rank, (0, None))
        if number == last and mean is not None:  # a repeated request: the answer was lost
            self._send(peer, Kind.MET, memory_of(mean), clock=number)
            return
        if any(len(numbers) != len(frame.body) for _, numbers in self._waiting_averages.values()):
            raise WireError("the numbers to average must have the same length on all workers")
        self._waiting_averages[rank] = number, frame.body
        self._finish_average()

    def _finish_average(self) -> None:
        present = set(self._waiting_averages)
        if not present or not present >= set(self.store.clocks()):
            return
        mean = torch.stack([self._waiting_averages[rank][1] for rank in sorted(present)]).mean(
            dim=0
        )
        numbers = {rank: number for rank, (number, _) in self._waiting_averages.items()}
        self._last_averages |= {rank: (number, mean) for rank, number in numbers.items()}
        self._waiting_averages = {}
        for peer in [p for p in self._peers if p.rank in present and p.started]:
            assert peer.rank is not None
            self._send(peer, Kind.MET, memory_of(mean), clock=numbers[peer.rank])

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

    # ---- removal of workers -----------------------------------------------------------------

    def _remove_silent_workers(self) -> None:
        now = time.monotonic()
        for peer in [p for p in self._peers if p.rank is None]:
            if now - peer.connection.sent_s > GREETING_S:
                self._drop(peer)
        heard_s = dict(self._last_frame_s)
        for peer in self._peers:  # a frame may take longer than `silent_s`
            if peer.rank is not None:
                heard_s[peer.rank] = max(heard_s[peer.rank], peer.connection.received_s)
        for rank, clock in self.store.clocks().items():
            if now - heard_s[rank] <= self._silent_s:
                continue
            for peer in [p for p in self._peers if p.rank == rank]:
                self._drop(peer)
            self._silent.add(rank)
            self._leave(rank)
            self._warn(
                f"no frame from rank {rank} for {self._silent_s:g} s: removed at clock {clock}; "
                f"{len(self.store.clocks())} workers continue"
            )

    def _leave(self, rank: int) -> None:
        self.store.leave(rank)
        self._waiting_averages.pop(rank, None)
        self._on_clock_change()
        self._finish_average()

    def _warn(self, words: str) -> None:
        warnings.warn(f"server {self.store.server}: {words}", RuntimeWarning, stacklevel=3)


def _numbers(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
