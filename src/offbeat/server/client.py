"""The client: a worker's pushes and pulls, on a thread of their own."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.core.transport.heartbeat import mark_peer_error
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.server.layout import Layout
from offbeat.server.optimizers import Settings, unpacked_state
from offbeat.server.protocol import Kind
from offbeat.server.upstream import Me, RefusedError, Upstream

ANSWERS_S = 3.0  # for a server to say who is where
MOST_FAILURES = 5  # connections that break one after the other, without an answer
NOTHING = memoryview(b"")


class ServerGoneError(RuntimeError):
    """A server does not respond any more, so the job cannot continue."""

    is_peer_error = True


class Client:
    """Pushes from `outgoing` and pulls into `incoming`, flat tensors on the host, while the worker
    computes.

    One push and one pull are under way at most. `outgoing` must stay as it is until `settle`
    returns; `incoming` is whole once `arrived` says so, and stays until `consume`. A connection
    that breaks is made again within `retry_s`, and what was not acknowledged is sent again: a
    server takes every push once. `gone` ends the sentence that says a server is lost. `resumed`:
    clocks of earlier jobs, up to the snapshot from which this job has begun.
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
        self.layout, self.resumed = layout, resumed
        self.outgoing, self.incoming = layout.flats(), layout.flats()
        self.clock = 0
        self._me = Me(rank, secret, layout.digest)
        self._timeout_s, self._beat_s, self._retry_s = timeout_s, beat_s, retry_s
        self._gone = gone
        self._ups = [
            Upstream(name, address, layout.of(i)) for i, (name, address) in enumerate(servers)
        ]
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._pending: set[int] = set()  # shards whose server has not acknowledged the push
        self._push: dict[str, Any] | None = None  # its meta; None: skipped
        self._missing: set[int] | None = None  # shards of the pull under way
        self._need = 0
        self._low: float = 0
        self._arrived: int | None = None
        self._asked: dict[Kind, Callable[[Upstream], None]] = {}  # what waits for one answer
        self._answer: Any = None
        self._meetings = 0  # so far; their number tells a repeated one from the next
        self._reconnecting = set[Upstream]()
        self._commands: deque[Callable[[], None]] = deque()
        self._wakes, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        try:
            self._begin()
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name=f"offbeat-ssp-{rank}", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Connect to all servers, and go on from the greatest of the clocks that they name."""
        welcomes = [up.connect(self._me, 0, True, self._room, self._timeout_s) for up in self._ups]
        self.clock = max(clock for clock, _ in welcomes)
        for up in self._ups:
            self._started(up, self.clock)

    # ---- what the worker calls --------------------------------------------------------------

    def push(self, settings: Settings, absent: Sequence[int] = (), *, skip: bool = False) -> None:
        """Send what is in `outgoing` for this clock, or word that there is nothing; on to the
        next clock."""
        with self._changed:
            assert not self._pending, "settle() comes before the next push"
            self._push = None if skip else {"settings": settings, "absent": list(absent)}
            self._pending = {shard.number for shard in self.layout.shards}
            for up in self._ups:
                up.push_clock = self.clock
            self.clock += 1
        self._do(lambda: [self._send_push(up) for up in self._ups])

    def settle(self) -> None:
        """Wait until the servers have acknowledged the push."""
        self._wait(lambda: not self._pending, "a push to be acknowledged")

    def pull(self, need: int) -> None:
        """Ask for the parameters, as soon as every worker's clock is at least `need`."""
        with self._changed:
            assert not self.pulling
            self._missing = {shard.number for shard in self.layout.shards}
            self._need, self._low = need, float("inf")
        self._do(lambda: [self._send_pull(up) for up in self._ups])

    @property
    def pulling(self) -> bool:
        """Whether a pull is under way, or has arrived and was not consumed."""
        return self._missing is not None or self._arrived is not None

    def arrived(self) -> int | None:
        """If a pull has arrived: all pushes of smaller clocks than this are in it."""
        self._check()
        return self._arrived

    def await_arrival(self) -> None:
        """Wait until the pull has arrived."""
        self._wait(lambda: self._arrived is not None, "parameters", self._need)

    def hurry(self) -> None:
        """Have the pull that is under way answered as things are."""
        self._need = 0
        self._do(lambda: [self._send(up, Kind.HURRY) for up in self._ups])

    def consume(self) -> None:
        """`incoming` may be written again."""
        self._arrived = None

    def meet(self, numbers: Tensor) -> Tensor:
        """Wait for all workers; the means of their numbers (float64)."""
        body = memory_of(numbers.contiguous())
        self._meetings += 1
        number = self._meetings

        def send(up: Upstream) -> None:
            self._send(up, Kind.MEET, body, clock=number)

        return self._ask(Kind.MET, self._ups[0], send, "all workers to meet")

    def clocks(self) -> dict[int, tuple[int, float]]:
        """By rank, of the workers that count: the clock, and seconds since last heard of."""
        found = self._ask(
            Kind.CLOCKS, self._ups[0], lambda up: self._send(up, Kind.STATUS), "the clocks"
        )
        return {int(rank): (int(clock), silent) for rank, (clock, silent) in found.items()}

    def state(self) -> list[tuple[int, list[tuple[int, str, Any]]]]:
        """The optimizer's state: for every shard (piece, name, value)."""
        found: list[tuple[int, list[tuple[int, str, Any]]]] = []
        for up in self._ups:
            for shard in up.shards:

                def send(up: Upstream, number: int = shard.number) -> None:
                    self._send(up, Kind.STATE, shard=number)

                values = self._ask(Kind.STATE_IS, up, send, "the optimizer's state")
                found.append((shard.number, values))
        return found

    @property
    def bytes_sent(self) -> int:
        """To all servers."""
        return sum(up.bytes_sent for up in self._ups)

    def close(self) -> None:
        """Say goodbye, and close all connections."""
        if not self._thread.is_alive():
            return
        self._do(self._say_bye)
        self._thread.join(self._timeout_s)

    # ---- waiting ----------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, done: Callable[[], bool], what: str, need: int | None = None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: done() or self._error is not None, timeout=self._timeout_s
            )
            self._check()
            if done():
                return
        error = RuntimeError(
            f"waited {self._timeout_s:g} s for {what}: {self._who(need)}; see their logs, or raise "
            "timeout_s"
        )
        mark_peer_error(error)
        raise error

    def _who(self, need: int | None) -> str:
        """Who is waited for: slow workers if the servers say so, else the servers."""
        with self._changed:
            waiting, self._timeout_s, timeout_s = set(self._asked), ANSWERS_S, self._timeout_s
            owing = self._pending | (self._missing or set())
        try:
            if Kind.CLOCKS in waiting:
                return str(self._ups[0])
            self._asked.clear()
            clocks = self.clocks()
        except RuntimeError:
            return f"{self._ups[0]}, which does not answer"
        finally:
            self._timeout_s = timeout_s
        slow = {rank: at for rank, at in clocks.items() if rank != self._me.rank}
        if need is not None:
            slow = {rank: at for rank, at in slow.items() if at[0] < need}
        if slow:
            words = (
                f"rank {rank} (clock {clock}, heard of {silent:g} s ago)"
                for rank, (clock, silent) in sorted(slow.items())
            )
            return ", ".join(words)
        behind = [up for up in self._ups if owing & {shard.number for shard in up.shards}]
        return ", ".join(map(str, behind or self._ups))

    def _ask(self, kind: Kind, up: Upstream, send: Callable[[Upstream], None], what: str) -> Any:
        """One question to one server, and its answer."""
        with self._changed:
            self._answer = None
            self._asked = {kind: lambda other: send(other) if other is up else None}
        self._do(lambda: send(up))
        self._wait(lambda: not self._asked, what)
        return self._answer

    def _do(self, command: Callable[[], object]) -> None:
        self._check()
        self._commands.append(lambda: (command(), None)[1])
        with suppress(OSError):  # a thread that ended has done it, or has said why not
            self._wakes.send(b"!")

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and self._idle()):
                self._turn()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._close_all()

    def _idle(self) -> bool:
        return all(up.connection is None or up.connection.idle for up in self._ups)

    def _turn(self) -> None:
        for key, events in self._selector.select(self._beat_s):
            if key.data is None:
                self._woken.recv(4096)
                continue
            up: Upstream = key.data
            if events & selectors.EVENT_READ:
                self._guarded(up, self._read)
            if events & selectors.EVENT_WRITE:
                self._guarded(up, self._write)
        while self._commands:
            self._commands.popleft()()
        self._send_beats(self._ups)

    def _send_beats(self, ups: Iterable[Upstream]) -> None:
        """Send a heartbeat to each of the servers to which nothing was sent for `beat_s`."""
        now = time.monotonic()
        for up in ups:
            if up.connection is not None and now - up.connection.spoke_s >= self._beat_s:
                self._send(up, Kind.BEAT)

    def _guarded(self, up: Upstream, act: Callable[[Upstream], None]) -> None:
        """Do something with a connection; if it breaks, make it anew."""
        try:
            if up.connection is not None:
                act(up)
        except WireError as error:
            raise RuntimeError(f"{up} sent what cannot be: {error}") from error
        except OSError as error:
            assert up.connection is not None
            self._selector.unregister(up.connection.sock)
            if self._closing:
                up.close()
            else:
                self._again(up, error)

    def _read(self, up: Upstream) -> None:
        assert up.connection is not None
        for frame in up.connection.receive():
            self._handle(up, frame)

    def _write(self, up: Upstream) -> None:
        assert up.connection is not None
        up.connection.flush()
        if up.connection.events != self._selector.get_key(up.connection.sock).events:
            self._selector.modify(up.connection.sock, up.connection.events, up)

    def _send(
        self, up: Upstream, kind: Kind, body: memoryview | None = None, **header: Any
    ) -> None:
        self._queue(up, kind, body, **header)
        self._guarded(up, self._write)

    def _queue(
        self, up: Upstream, kind: Kind, body: memoryview | None = None, **header: Any
    ) -> None:
        assert up.connection is not None
        size = 0 if body is None else len(body)
        up.connection.send(pack(kind, self._me.rank, body_bytes=size, **header), body)

    def _send_push(self, up: Upstream) -> None:
        for shard in up.shards:
            if shard.number not in self._pending:
                continue
            about: dict[str, Any] = {"shard": shard.number, "clock": up.push_clock}
            if self._push is None:
                self._queue(up, Kind.SKIP, **about)
            else:
                body = memory_of(self.outgoing[shard.dtype][shard.start : shard.stop])
                self._queue(up, Kind.PUSH, body, meta=self._push, **about)
        self._guarded(up, self._write)

    def _send_pull(self, up: Upstream) -> None:
        self._send(up, Kind.PULL, clock=self._need)

    def _say_bye(self) -> None:
        self._closing = True
        for up in self._ups:
            if up.connection is not None:
                self._send(up, Kind.BYE)

    # ---- answers ----------------------------------------------------------------------------

    def _room(self, up: Upstream, header: Header) -> tuple[Any, memoryview]:
        """Where a frame's body goes; WireError for what was not asked for."""
        if header.kind is Kind.PARAMETERS:
            mine = {shard.number: shard for shard in up.shards}.get(header.shard)
            if mine is None or self._missing is None or header.shard not in self._missing:
                raise WireError(f"shard {header.shard} was not asked for")
            return None, memory_of(self.incoming[mine.dtype][mine.start : mine.stop])
        if header.kind in (Kind.MET, Kind.STATE_IS):
            if header.kind not in self._asked or header.body_bytes > 1 << 30:
                raise WireError(f"{header.kind.name} was not asked for")
            body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
            return body, memory_of(body)
        return None, NOTHING

    def _handle(self, up: Upstream, frame: Frame) -> None:
        header = frame.header
        with self._changed:
            up.failures = 0
            if header.kind is Kind.TAKEN:
                if header.clock == up.push_clock:
                    self._pending.discard(header.shard)
            elif header.kind is Kind.PARAMETERS:
                assert self._missing is not None
                self._missing.discard(header.shard)
                self._low = min(self._low, header.clock)
                if not self._missing:
                    self._missing, self._arrived = None, int(self._low)
            elif header.kind is Kind.REFUSED:
                raise RefusedError(f"{up} refuses this rank: {frame.meta.get('why')}")
            elif header.kind in self._asked:
                self._answer = _answer(frame)
                self._asked = {}
            else:
                return  # nobody waits for it any more
            self._changed.notify_all()

    # ---- connecting again -------------------------------------------------------------------

    def _again(self, up: Upstream, error: OSError) -> None:
        """Connect once more and send again what was not acknowledged or answered."""
        up.failures += 1
        if up.failures > MOST_FAILURES:
            raise ServerGoneError(f"{up} breaks every connection ({error}); {self._gone}")
        mine = {shard.number for shard in up.shards}
        clock = up.push_clock if self._pending & mine else self.clock
        try:
            welcome, taken = self._connect_again(up, clock)
        except ConnectionError:
            raise ServerGoneError(f"{up} is gone ({error}); {self._gone}") from error
        with self._changed:
            owed = bool(self._pending & mine)  # the worker may have pushed meanwhile
            self._pending -= {n for n in mine if owed and taken.get(n, 0) > up.push_clock}
            if welcome > clock:  # counted out meanwhile: what is still owed counts for later
                up.push_clock = welcome
                self.clock = max(self.clock, welcome + int(owed))
            self._changed.notify_all()
        self._started(up, max(clock, welcome))
        if owed:
            self._send_push(up)
        if self._missing is not None and self._missing & mine:
            self._missing |= mine  # all of them come again
            self._send_pull(up)
        for send in list(self._asked.values()):
            send(up)

    def _connect_again(self, up: Upstream, clock: int) -> tuple[int, dict[int, int]]:
        """Connect to a server in a thread. Meanwhile, send heartbeats to the other servers, which
        would otherwise count this worker as silent."""
        found = Future[tuple[int, dict[int, int]]]()

        def connect() -> None:
            try:
                found.set_result(up.connect(self._me, clock, False, self._room, self._retry_s))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=connect, name="offbeat-reconnect", daemon=True).start()
        self._reconnecting.add(up)
        while not wait([found], self._beat_s / 2).done:
            self._send_beats(other for other in self._ups if other not in self._reconnecting)
        self._reconnecting.remove(up)
        return found.result()

    def _started(self, up: Upstream, clock: int) -> None:
        assert up.connection is not None
        self._selector.register(up.connection.sock, selectors.EVENT_READ, up)
        self._send(up, Kind.START, clock=clock)

    def _close_all(self) -> None:
        for up in self._ups:
            up.close()
        self._selector.close()
        self._wakes.close()
        self._woken.close()


def _answer(frame: Frame) -> Any:
    if frame.header.kind is Kind.MET:
        return frame.body.view(torch.float64)
    if frame.header.kind is Kind.STATE_IS:
        return unpacked_state(frame.meta["values"], frame.body)
    return frame.meta["clocks"]
