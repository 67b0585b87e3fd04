"""Workers of gossip in one process: threads, real sockets, small flat tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from offbeat.core.codecs import Codec
from offbeat.core.transport.listeners import open_listener
from offbeat.gossip.chunks import Wire, WireForm
from offbeat.gossip.clock import Clock
from offbeat.gossip.joining import get_place
from offbeat.gossip.settings import Settings
from offbeat.gossip.state import AVERAGING, State
from offbeat.gossip.worker import Gossip

SECRET = b"a secret of the tests"
SIZE = 50  # four chunks


@dataclass
class Worker:
    """One worker and its parameters."""

    gossip: Gossip
    state: State
    clock: Clock
    flat: Tensor
    began: Tensor | None = None  # what it had when it joined

    def gradient(self, update: Callable[[Tensor], Any] = lambda x: x, seconds: float = 0.0) -> None:
        """A forward, a backward that takes so long, and a step."""
        self.state.refresh()
        time.sleep(seconds)
        self.state.step(self.clock.now(), lambda: update(self.flat))
        self.gossip.record_gradient(max(seconds, 1e-3))

    def count(self) -> int:
        return sum(self.gossip.counts.exchanges.values())

    def consolidate(self, between: Callable[[int], Any] = lambda _: None) -> None:
        """As the session does it; `between` is called before each meeting."""
        nothing = [torch.zeros(1)]
        with self.gossip.consolidation():
            between(0)
            self.gossip.all_reduce(nothing)
            between(1)
            t = self.gossip.pause_all(max(self.clock.now(), self.state.t))
            self.state.midpoint()
            between(2)
            sums, _, workers = self.gossip.all_reduce([self.flat.clone()])
            between(3)
            self.state.set_parameters(self.gossip.agree_on_means([sums[0] / workers]), t)


@contextmanager
def job(
    graph: nx.Graph,
    flats: list[Tensor],
    *,
    form: WireForm = "none",
    codec: Codec | None = None,
    chunk_bytes: int = 64,
    snapshot: bool = True,
    secret: Callable[[int], bytes] = lambda _: SECRET,
    layout: Callable[[int], str] = lambda _: "",
    connect: bool = True,
    **settings: Any,
) -> Iterator[list[Worker]]:
    """The workers of a graph, connected; closed at the end."""
    settings = {"silent_s": 5.0, "timeout_s": 10.0, **settings}
    doors = [open_listener("127.0.0.1", 16) for _ in flats]
    addresses = {n: sock.getsockname() for n, sock in enumerate(doors)}
    workers = []
    for n, flat in enumerate(flats):
        made = Settings(graph, layout=layout(n), **settings)
        wire, clock = Wire([flat], form, chunk_bytes, codec), Clock()
        state = State([flat], wire, AVERAGING, snapshot=snapshot, momentum=made.momentum)
        gossip = Gossip(
            n,
            made,
            state,
            wire,
            clock,
            secret(n),
            addresses,
            doors[n],
            luggage=partial(packed, state),
        )
        workers.append(Worker(gossip, state, clock, flat))
    try:
        if connect:
            for worker in workers:
                worker.gossip.connect()
        yield workers
    finally:
        together([worker.gossip.close for worker in workers])


def packed(state: State, t: float) -> Tensor:
    """x as a worker gets it that joins."""
    with state.frozen_x(t) as (x,):
        return x.clone().view(torch.uint8)


def come(
    workers: list[Worker],
    flat: Tensor,
    *,
    through: int = 0,
    worker: int | None = None,
    secret: bytes = SECRET,
    layout: str = "",
    chunk_bytes: int = 64,
    codec: Codec | None = None,
    **settings: Any,
) -> Worker:
    """One more worker, which asks one of these for a place; among `workers` from then on."""
    settings = {"silent_s": 5.0, "timeout_s": 10.0, **settings}
    strategy = settings.get("strategy", "")
    about = {"layout": layout, "strategy": strategy, "id": worker}
    door = workers[through].gossip
    address = door._neighbours.addresses[door.me]
    place = get_place(address, secret, about, settings["timeout_s"])
    clock, wire = Clock(place.ahead_s), Wire([flat], "none", chunk_bytes, codec)
    state, entrance = State([flat], wire, AVERAGING), open_listener("127.0.0.1", 16)
    began = place.luggage.view(flat.dtype)
    state.set_parameters([began], 0.0)
    made = Settings(nx.Graph(place.first), **settings)
    gossip = Gossip(
        place.me,
        made,
        state,
        wire,
        clock,
        secret,
        place.near,
        entrance,
        place=place,
        luggage=partial(packed, state),
    )
    workers.append(Worker(gossip, state, clock, flat, began))
    gossip.connect()
    return workers[-1]


def together(acts: list[Callable[[], Any]]) -> list[Exception | None]:
    """Each on a thread of its own; what they raised."""
    raised: list[Exception | None] = [None] * len(acts)

    def run(n: int) -> None:
        try:
            acts[n]()
        except Exception as error:
            raised[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for something that other threads bring about."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


def warm(workers: list[Worker], count: int = 4) -> None:
    """Gradients enough for a unit of time, of 1 ms each."""
    for worker in workers:
        for _ in range(count):
            worker.gradient()
    until(lambda: all(worker.clock.unit_s is not None for worker in workers))


def flats(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, generator=random, dtype=dtype) for _ in range(count)]


def kill(worker: Worker) -> None:
    """As if its host had gone: no word, and nobody at its door."""
    peers = worker.gossip._peers
    worker.gossip._commands.append(lambda: setattr(worker.gossip, "_ended", True))
    peers.wake()
    worker.gossip._thread.join()


def cut(worker: Worker) -> None:
    """Break all its connections, wherever an exchange is."""
    peers = worker.gossip._peers
    worker.gossip._commands.append(lambda: [peers.drop(p) for p in peers.reachable()] and None)
    peers.wake()


def stall(worker: Worker, seconds: float) -> None:
    """Its gossip stands still for so long, as on a host that swaps: it does not even say that it
    lives."""
    stalled = threading.Event()

    def stand() -> None:
        stalled.set()
        time.sleep(seconds)

    worker.gossip._commands.append(stand)
    worker.gossip._peers.wake()
    stalled.wait()
