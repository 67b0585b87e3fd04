"""Client of the parameter servers: a worker's pushes and pulls in a background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.core.transport.peer_errors import mark_peer_error
from offbeat.frames.connection import NOTHING, ConnectionLoop
from offbeat.frames.frames import Frame, Header, WireError
from offbeat.server.layout import Layout
from offbeat.server.optimizers import Settings, unpacked_state
from offbeat.server.protocol import Kind
from offbeat.server.upstream import RefusedError, Upstream, WorkerIdentity

ANSWERS_S = 3.0  # longest wait for the workers' clocks while an error message is composed
# Body of a second answer: a request made while a connection breaks may be sent twice.
UNUSED = object()
MOST_FAILURES = 5  # largest number of broken connections to a server without a frame between them


class ServerGoneError(RuntimeError):
    """A server has stopped responding, so the job cannot continue."""

    is_peer_error = True


@dataclass
class _Request:
    """Request to one server. The answer has its shard and clock."""

    up: Upstream
    kind: Kind
    answered_by: Kind
    shard: int = 0
    clock: int = 0
    body: memoryview | None = None
    answer: Any = None


class Client(ConnectionLoop[Upstream]):
    """Pushes from `outgoing` and pulls into `incoming` while the worker computes.

    Both are flat tensors on the host, one per dtype. At most one push and one pull are under way.
    Do not write `outgoing` before `settle` returns. `incoming` is complete once `arrived_clock`
    returns a clock, and is not overwritten before `release_incoming`. The client restores a broken
    connection within `retry_s` and repeats requests without an answer; servers ignore repeated
    pushes. `clock` is the number of the next push.

    Args:
        layout: places of the parameters and shards.
        servers: name and (host, port) of each server.
        rank: rank of this worker.
        secret: the job's secret.
        timeout_s: longest wait for an answer, in seconds.
        beat_s: a server gets a heartbeat after this time without another frame.
        retry_s: longest time for restoring a broken connection, at most twice `beat_s`.
        gone: remedy at the end of the error message for a lost server.
        resumed: clock of the snapshot from which the servers have resumed.
    """

    def __init__(
        self,
        layout: Layout,
        servers: Sequence[tuple[str, tuple[str, int]]],
        rank: int,
        secret: bytes,
        *,
        timeout_s: float,
        beat_s: float,
        retry_s: float = 5.0,
        gone: str = "start the job again",
        resumed: int = 0,
    ):
        super().__init__(rank)
        self.layout, self.resumed = layout, resumed
        self.outgoing, self.incoming = layout.flats(), layout.flats()
        self.clock = 0
        self._identity = WorkerIdentity(rank, secret, layout.digest)
        self._timeout_s, self._beat_s, self._retry_s = timeout_s, beat_s, retry_s
        self._gone = gone
        self._ups = [
            Upstream(name, address, layout.of(i)) for i, (name, address) in enumerate(servers)
        ]
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._pending: set[int] = set()  # shards whose server has not acknowledged the push
        self._push: dict[str, Any] | None = None  # meta of the push; None: skip
        self._missing: set[int] | None = None  # shards of the pull under way
        self._need = 0
        self._low: float = 0
        self._arrived: int | None = None
        self._request: _Request | None = None  # whose answer the worker awaits
        self._averages = 0  # so far; the server recognises a repeated request by its number
        self._commands: deque[Callable[[], object]] = deque()
        self._closing = False
        try:
            self._begin()
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name=f"offbeat-ssp-{rank}", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Connect to all servers. Continue from the greatest clock in their welcomes."""
        welcomes = [
            up.connect(self._identity, 0, True, self._body_buffer, self._timeout_s)
            for up in self._ups
        ]
        self.clock = max(clock for clock, _ in welcomes)
        for up in self._ups:
            self._start_pushes(up, self.clock)

    # ---- called by the worker ---------------------------------------------------------------

    def push(self, settings: Settings, absent: Sequence[int] = (), *, skip: bool = False) -> None:
        """Start pushing `outgoing` for this clock, or `skip` the clock, and advance the clock.

        `settings` are those of the optimizer. `absent` lists the parameters without gradient.
        """
        with self._changed:
            assert not self._pending, "settle() comes before the next push"
            self._push = None if skip else {"settings": settings, "absent": list(absent)}
            self._pending = {shard.number for shard in self.layout.shards}
            for up in self._ups:
                up.push_clock = self.clock
            self.clock += 1
        self._run_in_thread(lambda: [self._send_push(up) for up in self._ups])

    def settle(self) -> None:
        """Wait until the servers have acknowledged the push."""
        self._wait(lambda: not self._pending, "a push to be acknowledged")

    def pull(self, need: int) -> None:
        """Start a pull, which servers answer once every worker's clock is at least `need`."""
        with self._changed:
            assert not self.pulling
            self._missing = {shard.number for shard in self.layout.shards}
            self._need, self._low = need, float("inf")
        self._run_in_thread(self._send_pulls)

    @property
    def pulling(self) -> bool:
        """Whether a pull is under way or not consumed yet."""
        return self._missing is not None or self._arrived is not None

    def arrived_clock(self) -> int | None:
        """Return the clock below which all pushes are in `incoming`; None before it is complete."""
        self._check()
        return self._arrived

    def await_arrival(self) -> None:
        """Wait until the pulled parameters are complete."""
        self._wait(lambda: self._arrived is not None, "parameters", self._need)

    def expedite_pull(self) -> None:
        """Request an answer to the current pull at once, whatever the workers' clocks."""
        self._need = 0
        self._run_in_thread(self._send_pulls)

    def release_incoming(self) -> None:
        """Release `incoming` for the next pull."""
        self._arrived = None

    def average(self, numbers: Tensor) -> Tensor:
        """Return the elementwise average of the float64 tensors of all workers.

        Waits for all workers at the first server.
        """
        self._averages += 1
        body = memory_of(numbers.contiguous())
        request = _Request(self._ups[0], Kind.MEET, Kind.MET, clock=self._averages, body=body)
        self._wait(self._ask(request), "all workers to meet")
        return request.answer

    def clocks(self, limit_s: float = ANSWERS_S) -> dict[int, tuple[int, float]] | None:
        """Return by rank the clock of each worker and the seconds since its last frame; None if
        server 0 does not answer."""
        request = _Request(self._ups[0], Kind.STATUS, Kind.CLOCKS)
        if not self._wait_for(self._ask(request), limit_s):
            return None
        answer = request.answer.items()
        return {int(rank): (int(clock), silent) for rank, (clock, silent) in answer}

    def state(self) -> list[tuple[int, list[tuple[int, str, Any]]]]:
        """Return (shard number, optimizer state as (piece, name, value)) for each shard."""
        states: list[tuple[int, list[tuple[int, str, Any]]]] = []
        for up in self._ups:
            for shard in up.shards:
                request = _Request(up, Kind.STATE, Kind.STATE_IS, shard=shard.number)
                self._wait(self._ask(request), "the optimizer's state")
                states.append((shard.number, request.answer))
        return states

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all servers so far."""
        return sum(up.bytes_sent for up in self._ups)

    def close(self) -> None:
        """Announce to the servers that this worker leaves, and close all connections."""
        if not self._thread.is_alive():
            return
        self._run_in_thread(self._send_bye)
        self._thread.join(self._timeout_s)

    # ---- waiting ----------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None, limit_s)
            self._check()
            return done()

    def _wait(self, done: Callable[[], bool], what: str, need: int | None = None) -> None:
        if self._wait_for(done, self._timeout_s):
            return
        error = RuntimeError(
            f"waited {self._timeout_s:g} s for {what}: {self._describe_blockers(need)}; see their "
            "logs, or raise timeout_s"
        )
        mark_peer_error(error)
        raise error

    def _describe_blockers(self, need: int | None) -> str:
        """Describe the workers or servers that this worker waits for.

        Slow workers are named if server 0 answers a request for clocks, otherwise servers.
        """
        owing = self._pending | (self._missing or set())
        clocks = self.clocks()
        if clocks is None:
            return f"{self._ups[0]}, which does not answer"
        slow = [
            f"rank {rank} (clock {clock}, last frame {silent:g} s ago)"
            for rank, (clock, silent) in sorted(clocks.items())
            if rank != self.me and (need is None or clock < need)
        ]
        behind = [up for up in self._ups if owing & {shard.number for shard in up.shards}]
        return ", ".join(slow or map(str, behind or self._ups))

    def _ask(self, request: _Request) -> Callable[[], bool]:
        """Send a request. Return whether its answer has arrived, as a function."""
        with self._changed:
            self._request = request
        self._run_in_thread(lambda: self._send_request(request))
        return lambda: self._request is None

    def _run_in_thread(self, command: Callable[[], object]) -> None:
        self._check()
        self._commands.append(command)
        self.wake()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and self._idle()):
                self._handle_events()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._close_all()

    def _idle(self) -> bool:
        return all(up.connection is None or up.connection.idle for up in self._ups)

    def _handle_events(self) -> None:
        self._process_sockets(self._beat_s)
        while self._commands:
            self._commands.popleft()()
        self._send_beats()

    def _send_beats(self) -> None:
        """Send a heartbeat to each connected server to which nothing was sent for `beat_s`."""
        now = time.monotonic()
        for up in self._peers:
            if up.connection is not None and now - up.connection.sent_s >= self._beat_s:
                self._send(up, Kind.BEAT)

    def _on_invalid_frame(self, peer: Upstream, error: WireError) -> None:
        raise RuntimeError(f"{peer} sent an invalid frame: {error}") from error

    def _on_connection_error(self, peer: Upstream, error: OSError) -> None:
        self._drop(peer)
        if self._closing:
            peer.close()
        else:
            self._reconnect(peer, error)

    def _send_push(self, up: Upstream) -> None:
        for shard in up.shards:
            if shard.number not in self._pending:
                continue
            about: dict[str, Any] = {"shard": shard.number, "clock": up.push_clock}
            if self._push is None:
                self._send(up, Kind.SKIP, **about)
            else:
                body = memory_of(self.outgoing[shard.dtype][shard.start : shard.stop])
                self._send(up, Kind.PUSH, body, meta=self._push, **about)

    def _send_pulls(self) -> None:
        for up in self._ups:
            self._send(up, Kind.PULL, clock=self._need)

    def _send_request(self, one: _Request) -> None:
        self._send(one.up, one.kind, one.body, shard=one.shard, clock=one.clock)

    def _send_bye(self) -> None:
        self._closing = True
        for up in self._ups:
            self._send(up, Kind.BYE)

    # ---- answers ----------------------------------------------------------------------------

    def _body_buffer(self, up: Upstream, header: Header) -> tuple[Any, memoryview]:
        """Return (body, its memory) for a frame. WireError without a request for this frame."""
        if header.kind is Kind.PARAMETERS:
            shard_spec = {shard.number: shard for shard in up.shards}.get(header.shard)
            if shard_spec is None:
                raise WireError(f"shard {header.shard} is not on this server")
            missing = self._missing or ()
            if header.shard not in missing or header.clock < self._need:
                return UNUSED, memoryview(bytearray(header.body_bytes))
            return None, memory_of(
                self.incoming[shard_spec.dtype][shard_spec.start : shard_spec.stop]
            )
        if header.kind in (Kind.MET, Kind.STATE_IS):
            if header.body_bytes > 1 << 30:
                raise WireError(f"{header.kind.name} ({header.body_bytes} bytes) is too large")
            if not self._is_awaited(header):
                return UNUSED, memoryview(bytearray(header.body_bytes))
            body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
            return body, memory_of(body)
        return None, NOTHING

    def _on_frame(self, peer: Upstream, frame: Frame) -> None:
        header = frame.header
        with self._changed:
            peer.failures = 0
            if frame.body is UNUSED:
                return
            if header.kind is Kind.TAKEN:
                if header.clock == peer.push_clock:
                    self._pending.discard(header.shard)
            elif header.kind is Kind.PARAMETERS:
                assert self._missing is not None
                self._missing.discard(header.shard)
                self._low = min(self._low, header.clock)
                if not self._missing:
                    self._missing, self._arrived = None, int(self._low)
            elif header.kind is Kind.REFUSED:
                raise RefusedError(f"{peer} refuses this rank: {frame.meta.get('why')}")
            elif self._is_awaited(header):
                assert self._request is not None
                self._request.answer, self._request = _answer(frame), None
            else:
                return  # the wait for this answer has ended
            self._changed.notify_all()

    def _is_awaited(self, header: Header) -> bool:
        one = self._request
        about = header.kind, header.shard, header.clock
        return one is not None and about == (one.answered_by, one.shard, one.clock)

    # ---- reconnection -----------------------------------------------------------------------

    def _reconnect(self, up: Upstream, error: OSError) -> None:
        """Connect again, and repeat pushes without acknowledgement and requests without answer."""
        up.failures += 1
        if up.failures > MOST_FAILURES:
            raise ServerGoneError(f"{up} closes every connection ({error}); {self._gone}")
        shard_numbers = {shard.number for shard in up.shards}
        clock = up.push_clock if self._pending & shard_numbers else self.clock
        try:
            # The other servers get no heartbeat meanwhile, and must not remove this worker.
            limit_s = min(self._retry_s, 2 * self._beat_s)
            welcome, taken = up.connect(self._identity, clock, False, self._body_buffer, limit_s)
        except ConnectionError:
            raise ServerGoneError(f"{up} cannot be reached ({error}); {self._gone}") from error
        with self._changed:
            owed = bool(self._pending & shard_numbers)  # the worker may have pushed meanwhile
            self._pending -= {n for n in shard_numbers if owed and taken.get(n, 0) > up.push_clock}
            # If the server has removed this worker meanwhile, a pending push gets a later clock.
            if welcome > clock:
                up.push_clock = welcome
                self.clock = max(self.clock, welcome + int(owed))
            self._changed.notify_all()
        self._start_pushes(up, max(clock, welcome))
        if owed:
            self._send_push(up)
        if self._missing is not None and self._missing & shard_numbers:
            self._missing |= shard_numbers  # the server will send all its shards again
            self._send(up, Kind.PULL, clock=self._need)
        if self._request is not None and self._request.up is up:
            self._send_request(self._request)

    def _start_pushes(self, up: Upstream, clock: int) -> None:
        self._add_peer(up)
        self._send(up, Kind.START, clock=clock)

    def _close_all(self) -> None:
        super().close()
        for up in self._ups:
            up.close()


def _answer(frame: Frame) -> Any:
    if frame.header.kind is Kind.MET:
        return frame.body.view(torch.float64)
    if frame.header.kind is Kind.STATE_IS:
        return unpacked_state(frame.meta["values"], frame.body)
    return frame.meta["clocks"]
