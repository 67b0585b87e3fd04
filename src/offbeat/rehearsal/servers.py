"""Parameter servers in a rehearsal: pushes and pulls in the order of the simulator's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.core.profile import Profile
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.sim.separate_workers import server_of
from offbeat.rehearsal.cluster import MemoryCluster, MemoryControl
from offbeat.rehearsal.events import BEGIN, END, PUSH, Event, EventOrder
from offbeat.rehearsal.links import MemoryNetwork
from offbeat.rehearsal.replayed_servers import ServedReplay
from offbeat.server.client import Client
from offbeat.server.layout import Layout
from offbeat.server.optimizers import Settings
from offbeat.server.parameters import Shard, Store
from offbeat.server.serving import layout_of
from offbeat.server.session import SSPSession
from offbeat.server.simulation import simulate_served
from offbeat.server.strategies import SSP

SHARED = "server"
FIRST = 64  # clocks of the first simulation; each further one is twice as long
# Kinds of events: a push has arrived at the server, the server answers a pull, and the answer has
# arrived at the worker.
PUSHED, ANSWER, ARRIVE = 10, 11, 12
KINDS = {
    "begin": BEGIN,
    "computed": END,
    "push": PUSH,
    "pushed": PUSHED,
    "answer": ANSWER,
    "arrive": ARRIVE,
}
Values = dict[torch.dtype, Tensor]


@dataclass
class _Traffic:
    """Messages between one worker and the server.

    Attributes:
        push: gradients on their way to the server: (clock, values, settings, absent parameters);
            values are None for a clock without gradients. None: no push is on its way.
        arrivals: pushes whose arrival is over before the worker has sent them.
        need: least clock of the answer to the pull; None without a pull.
        answers: answers that are over before the worker has requested them.
        answer: clock and parameters that the server has sent; None before its answer.
        deliveries: deliveries that are over before the server has answered.
        arrived: clock and parameters that have arrived and are not consumed.
    """

    push: tuple[int, Values | None, Settings, Sequence[int]] | None = None
    arrivals: int = 0
    need: int | None = None
    answers: int = 0
    answer: tuple[int, Values] | None = None
    deliveries: int = 0
    arrived: tuple[int, Values] | None = None


class ServedOrder(EventOrder):
    """Compute, pushes and pulls of all workers, in the order of their simulated times.

    Args:
        strategy: strategy of the job.
        profile: profile of the job.
        store: store of the server.
        network: seed of the simulation, differences between ranks, and turns of the workers.
    """

    drops_gradients = False
    end_kind = PUSH

    def __init__(
        self, strategy: SSP, profile: Profile, store: Store, network: MemoryNetwork
    ) -> None:
        super().__init__(profile.world_size, network.turns)
        self.store = store
        store.use_clock(lambda: self.now_s)
        self._simulate = partial(
            simulate_served,
            strategy,
            profile,
            network.differences,
            server_of(profile, 1, network.differences),
            seed=network.seed,
        )
        self._traffic = [_Traffic() for _ in range(profile.world_size)]
        self._clocks, self._next = FIRST, 0
        self._events: list[tuple[float, str, int]] = []
        self._complete_s = -1.0  # time before which the events are those of any longer simulation

    # ---- workers ----------------------------------------------------------------------------

    @property
    def shards(self) -> dict[int, Shard]:
        """Return the shards of the server, by number."""
        return self.store.shards

    @property
    def lowest_clock(self) -> float:
        """Return the lowest clock of all workers on the server."""
        return self.store.lowest_clock

    def push(
        self,
        worker: int,
        clock: int,
        values: Values | None,
        settings: Settings,
        absent: Sequence[int],
    ) -> None:
        """Send gradients of a clock to the server. `values` None: there are none."""
        traffic = self._traffic[worker]
        traffic.push = clock, values, settings, absent
        if traffic.arrivals:
            traffic.arrivals -= 1
            self._deliver_push(worker)

    def is_taken(self, worker: int) -> bool:
        """Return whether the last push of a worker has arrived at the server."""
        self.advance()
        return self._traffic[worker].push is None

    def pull(self, worker: int, need: int) -> None:
        """Request parameters that include all pushes of clocks below `need`."""
        traffic = self._traffic[worker]
        traffic.need = need
        if traffic.answers:
            traffic.answers -= 1
            self._answer(worker)

    def arrived_parameters(self, worker: int) -> tuple[int, Values] | None:
        """Return the parameters that have arrived at a worker, with their clock."""
        self.advance()
        return self._traffic[worker].arrived

    def release(self, worker: int) -> None:
        """Consume the parameters that have arrived at a worker."""
        self._traffic[worker].arrived = None

    def is_pulling(self, worker: int) -> bool:
        """Return whether a pull is under way or not consumed yet."""
        traffic = self._traffic[worker]
        return traffic.need is not None or traffic.arrived is not None

    def flush(self) -> None:
        """Step with pushes that wait for others, when all workers have met."""
        if self.store.flush():
            self._answer_waiting()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._traffic[worker] = _Traffic()
        self.store.leave(worker)
        self._answer_waiting()

    # ---- events -----------------------------------------------------------------------------

    def head(self) -> Event | None:
        while self._next == len(self._events) or self._events[self._next][0] >= self._complete_s:
            timeline, _ = self._simulate(clocks=self._clocks)
            self._events = timeline.events
            # Workers that have computed all clocks send no further messages.
            self._complete_s = min(ends[-1] for ends in timeline.ends_s)
            self._clocks *= 2
        at_s, kind, worker = self._events[self._next]
        return Event(at_s, KINDS[kind], worker)

    def take(self) -> Event:
        event = self.head()
        assert event is not None
        self._next += 1
        return event

    def has_messages(self) -> bool:
        lowest = self.store.lowest_clock
        return any(
            traffic.push is not None
            or traffic.answer is not None
            or (traffic.need is not None and traffic.need <= lowest)
            for traffic in self._traffic
        )

    def run(self, event: Event) -> None:
        worker = event.number
        if worker in self._gone:
            return
        if self.store.advance():
            self._answer_waiting()
        traffic = self._traffic[worker]
        if event.kind == PUSHED:
            if traffic.push is None:
                traffic.arrivals += 1
            else:
                self._deliver_push(worker)
        elif event.kind == ANSWER:
            if traffic.need is None:
                traffic.answers += 1
            else:
                self._answer(worker)
        elif traffic.answer is None:
            traffic.deliveries += 1
        else:
            self._deliver_answer(worker)

    def _deliver_push(self, worker: int) -> None:
        traffic = self._traffic[worker]
        assert traffic.push is not None
        clock, values, settings, absent = traffic.push
        traffic.push = None
        for shard in self.store.shards.values():
            shard.receive(worker, clock, values, settings, absent)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answer the pulls whose answers were due before their clock was complete."""
        for worker, traffic in enumerate(self._traffic):
            if traffic.answers and traffic.need is not None:
                traffic.answers -= 1
                self._answer(worker)

    def _answer(self, worker: int) -> None:
        """Answer a pull, or keep it until the clocks of all workers are high enough."""
        traffic, lowest = self._traffic[worker], self.store.lowest_clock
        assert traffic.need is not None
        if lowest < traffic.need:
            traffic.answers += 1
            return
        traffic.need = None
        traffic.answer = int(min(lowest, 1 << 62)), self.parameters()
        if traffic.deliveries:
            traffic.deliveries -= 1
            self._deliver_answer(worker)

    def _deliver_answer(self, worker: int) -> None:
        traffic = self._traffic[worker]
        traffic.arrived, traffic.answer = traffic.answer, None

    def parameters(self) -> Values:
        """Return a copy of the parameters on the server."""
        flats = self.store.layout.flats()
        for shard in self.store.shards.values():
            shard.send(flats)
        return flats


@dataclass
class SimulatedClient:
    """Client of a worker whose pushes and pulls are events of the simulated time.

    It has the methods of `offbeat.server.client.Client` that sessions use.

    Attributes:
        layout: places of the parameters.
        rank: rank of the worker.
        order: events of all workers.
        control: exchange of values with the other workers.
        resumed: 0, as nothing is resumed.
        clock: number of the next push.
        bytes_sent: bytes of all pushes.
        log: None, as a rehearsal records no order.
    """

    layout: Layout
    rank: int
    order: ServedOrder | ServedReplay
    control: MemoryControl
    resumed: int = 0
    clock: int = 0
    bytes_sent: int = 0
    log: None = None
    outgoing: Values = field(init=False)
    incoming: Values = field(init=False)

    def __post_init__(self) -> None:
        self.outgoing, self.incoming = self.layout.flats(), self.layout.flats()

    def push(self, settings: Settings, absent: Sequence[int] = (), *, skip: bool = False) -> None:
        self.order.wait(self.rank, PUSH)
        values = None if skip else {dtype: x.clone() for dtype, x in self.outgoing.items()}
        self.bytes_sent += 0 if skip else sum(x.nbytes for x in self.outgoing.values())
        self.order.push(self.rank, self.clock, values, settings, absent)
        self.clock += 1

    def settle(self) -> None:
        self.order.turns.wait_until(
            lambda: self.order.is_taken(self.rank), lambda: "the arrival of its push"
        )

    def pull(self, need: int) -> None:
        self.order.pull(self.rank, need)

    @property
    def pulling(self) -> bool:
        return self.order.is_pulling(self.rank)

    def arrived_clock(self) -> int | None:
        arrived = self.order.arrived_parameters(self.rank)
        if arrived is None:
            return None
        clock, values = arrived
        for dtype, x in self.incoming.items():
            x.copy_(values[dtype])
        return clock

    def await_arrival(self) -> None:
        self.order.turns.wait_until(
            lambda: self.order.arrived_parameters(self.rank) is not None,
            lambda: "parameters of the server",
        )

    def release_incoming(self) -> None:
        self.order.release(self.rank)

    def average(self, numbers: Tensor) -> Tensor:
        everyone = self.control.share(numbers)
        self.order.flush()
        return torch.stack(everyone).mean(0)

    def state(self) -> list[tuple[int, list[tuple[int, str, Any]]]]:
        found = []
        for number, shard in self.order.shards.items():
            values = [
                (place, name, value.detach().clone() if isinstance(value, Tensor) else value)
                for place, piece in enumerate(shard.pieces)
                for name, value in shard.optimizer.state.get(piece, {}).items()
            ]
            found.append((number, values))
        return found

    def close(self) -> None:
        self.order.leave(self.rank)


class ReplayedClient(SimulatedClient):
    """Client of a worker whose parameters arrive as in a recorded job."""

    def arrived_clock(self) -> int | None:
        assert isinstance(self.order, ServedReplay)
        if not self.order.has_arrived(self.rank):
            return None
        self.await_arrival()
        return super().arrived_clock()

    def expedite_pull(self) -> None:
        """Return at once: the recorded order has the answer."""


class RehearsedServerSession(SSPSession):
    """Session of a worker whose pushes and pulls are events of the simulated time.

    Code that reads the parameters between two iterations receives the server's newest ones at once.
    """

    def __init__(self, strategy: SSP, job: TrainingJob, client: SimulatedClient) -> None:
        assert isinstance(client.order, ServedOrder)
        self._order, self._rank = client.order, client.rank
        super().__init__(strategy, job, _as_client(client), None)

    def _await_parameters(self) -> None:
        if not self._open and not self._waiting:
            self._order.wait(self._rank, BEGIN)
        super()._await_parameters()

    def _update(self, skip_update: bool) -> None:
        if self._waiting + 1 == self._strategy.accumulate:
            self._order.wait(self._rank, END)
        super()._update(skip_update)

    def _pull_newest(self, need: int) -> None:
        order = self._order
        self._client.settle()
        order.turns.wait_until(
            lambda: order.lowest_clock >= need, lambda: f"pushes of clock {need - 1}"
        )
        for dtype, values in order.parameters().items():
            self._client.incoming[dtype].copy_(values)
        self._copy_incoming(int(min(order.lowest_clock, 1 << 62)))
        self._fresh = True

    def _load_pulled(self) -> None:
        self._client.await_arrival()
        low = self._client.arrived_clock()
        assert low is not None
        if low >= self._low:  # code that has read the parameters may have got newer ones
            self._copy_incoming(low)
        self._client.release_incoming()


def _as_client(client: SimulatedClient) -> Client:
    return client  # type: ignore[return-value] # has the methods that sessions use


def _open_order(
    strategy: SSP, job: TrainingJob, layout: Layout, network: MemoryNetwork
) -> ServedOrder | ServedReplay:
    """Return the order of the events: a recorded one, or that of the simulator."""
    recorded, profile = network.recorded, job.profile
    assert profile is not None
    if recorded is not None:
        recorded.require_model(job.observation.model)
        network.timeline = recorded.trace
        return ServedReplay(strategy, job, layout, recorded, network.turns)
    store = strategy.make_store(layout, 0, job.optimizer, job.ranks.workers)
    order = ServedOrder(strategy, profile, store, network)
    network.timeline = partial(order.trace, str(strategy), profile, strategy.accumulate)
    return order


def open_rehearsed_session(strategy: SSP, job: TrainingJob) -> SSPSession:
    """Return the session of a worker in a rehearsal with one server, which is no replica, or with
    the servers of a recorded job.

    Raises:
        ValueError: servers cannot step the parameters in pieces with this optimizer.
    """
    cluster = job.cluster
    assert isinstance(cluster, MemoryCluster)
    assert isinstance(cluster.control, MemoryControl)
    layout, network = layout_of(job.optimizer, strategy, job.ranks), cluster.network
    order = network.shared.get(SHARED)
    if order is None:
        order = network.shared[SHARED] = _open_order(strategy, job, layout, network)
    cluster.control.meet("the start of the server")
    if job.recorder is not None:
        job.recorder.start(str(strategy), None, observed=0)
    base, rank = strategy.session_class(), cluster.control.rank
    if network.recorded is not None:
        replayed = ReplayedClient(layout, rank, order, cluster.control)
        return base(strategy, job, _as_client(replayed), None)
    client = SimulatedClient(layout, rank, order, cluster.control)
    bases = (RehearsedServerSession,) if base is SSPSession else (RehearsedServerSession, base)
    session: type[RehearsedServerSession] = type(f"Rehearsed{base.__name__}", bases, {})
    return session(strategy, job, client)
