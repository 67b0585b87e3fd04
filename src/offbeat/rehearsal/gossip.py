"""Gossip in a rehearsal: exchanges between replicas in the order of the simulator's events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.core.profile import Profile
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.sim.separate_workers import server_of
from offbeat.gossip.agreement import PERIOD, Agreement
from offbeat.gossip.agreement_rounds import NOTICE, NOTICE_S
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.clock import Clock
from offbeat.gossip.exchange import ExchangeRecord, Exchanges
from offbeat.gossip.prediction import graph_of, message_bytes, simulate_strategy
from offbeat.gossip.session import GossipSession
from offbeat.gossip.simulation import Timeline
from offbeat.gossip.startup import GossipSetup, require_elementwise
from offbeat.gossip.state import Mixing, State
from offbeat.gossip.strategies import Gossip as GossipStrategy
from offbeat.rehearsal.cluster import MemoryCluster, MemoryControl
from offbeat.rehearsal.events import BEGIN, END, Event, EventOrder
from offbeat.rehearsal.links import MemoryNetwork
from offbeat.rehearsal.replayed_gossip import GossipReplay, ReplayedState

SHARED = "gossip"
FIRST = 64  # gradients per worker of the first simulation; each further one is twice as long
# Kinds of events, in the order of events at the same time.
AGREEMENT, APPLY, SNAPSHOT = 10, 11, 12
SNAPSHOTS_ONLY = (
    "weights ('live') must be 'snapshot' in a rehearsal, in which no exchange can change the "
    "weights within a forward or backward; set weights=snapshot"
)


@dataclass
class _Member:
    """One worker: its parameters, its exchanges, and its completed exchanges by partner."""

    state: State
    exchanges: Exchanges
    counts: dict[int, int]
    last: list[ExchangeRecord]


class GossipOrder(EventOrder):
    """Gradients and exchanges of all workers, in the order of their simulated times.

    Args:
        strategy: strategy of the job.
        profile: profile of the job.
        network: seed of the simulation, differences between ranks, and turns of the workers.
    """

    drops_gradients = True

    def __init__(self, strategy: GossipStrategy, profile: Profile, network: MemoryNetwork) -> None:
        super().__init__(profile.world_size, network.turns)
        self._strategy, self._profile, self._network = strategy, profile, network
        self._members: dict[int, _Member] = {}
        server = server_of(profile, 1, network.differences)
        graph = graph_of(strategy, server, message_bytes(strategy, profile))
        self._agreement = Agreement(sorted((min(e), max(e)) for e in graph.edges))
        self._counted = 0  # exchanges since `Agreement.counted_from`
        self._running: set[int] = set()  # exchanges between their snapshot and their end
        self._events: list[Event] = []
        self._next = 0
        self._gradients = FIRST * profile.world_size
        self._simulate()

    # ---- workers ----------------------------------------------------------------------------

    def join(self, worker: int, state: State, exchanges: Exchanges) -> None:
        """Add a worker. All workers must join before the first event."""
        self._members[worker] = _Member(state, exchanges, {}, [])
        state.change_mixing(0.0, self._constants())

    @property
    def label(self) -> float:
        """Return the current time in units of the mean time of a gradient."""
        return self.now_s / self._timeline.unit_s

    def exchanges_of(self, worker: int) -> tuple[dict[int, int], list[ExchangeRecord]]:
        """Return the completed exchanges of a worker: counts by partner, and all of them."""
        member = self._members[worker]
        return member.counts, member.last

    @property
    def unit_s(self) -> float:
        """Return the seconds of a unit of time."""
        return self._timeline.unit_s

    def _constants(self) -> Mixing:
        strategy = self._strategy
        return self._agreement.constants(strategy.rate, momentum=strategy.momentum)

    # ---- events -----------------------------------------------------------------------------

    def head(self) -> Event | None:
        # Later events may still lack some that begin before them.
        while (
            self._next == len(self._events)
            or self._events[self._next].at_s >= self._timeline.complete_s
        ):
            self._gradients *= 2
            self._simulate()
        return self._events[self._next]

    def take(self) -> Event:
        self._next += 1
        return self._events[self._next - 1]

    def _simulate(self) -> None:
        """Simulate more gradients. The events so far are the first ones of the result."""
        self._timeline = simulate_strategy(
            self._strategy,
            self._profile,
            self._network.differences,
            gradients=self._gradients,
            seed=self._network.seed,
        )
        self._events = _events_of(self._timeline)

    def run(self, event: Event) -> None:
        if event.kind == AGREEMENT:
            self._agree(float(event.number) * PERIOD)
            return
        i, j = map(int, self._timeline.exchange_edge[event.number])
        if event.kind == SNAPSHOT:
            if not {i, j} & self._gone:
                self._running.add(event.number)
                self._begin_exchange(i, j)
        elif event.number in self._running:
            self._running.remove(event.number)
            self._end_exchange(i, j, event.number)

    def _begin_exchange(self, i: int, j: int) -> None:
        one, other = self._members[i].exchanges, self._members[j].exchanges
        mixing, t = self._members[i].state.course.mixing_at(self.label), self.label
        coded = one.anchor_number(j) == other.anchor_number(i) != NEVER
        number = max(one.next_number(j), other.next_number(i))
        one.begin(j, number, t, mixing, coded=coded)
        other.begin(i, number, t, mixing, coded=coded)

    def _end_exchange(self, i: int, j: int, number: int) -> None:
        ends = [(self._members[i].exchanges, j, i), (self._members[j].exchanges, i, j)]
        (one, *_), (other, *_) = ends
        for chunk in range(len(one.wire.chunks)):
            other.buffer(chunk)[:] = one.data(chunk)
            one.buffer(chunk)[:] = other.data(chunk)
            for exchanges, *_ in ends:
                exchanges.apply_chunk()
        begin_s = float(self._timeline.exchange_start_s[number])
        for exchanges, partner, worker in ends:
            assert exchanges.now is not None
            exchanges.now.confirmed = True
            member, now = self._members[worker], exchanges.now
            member.counts[partner] = member.counts.get(partner, 0) + 1
            member.last.append(
                ExchangeRecord(partner, now.number, begin_s, self.now_s, exchanges.bytes)
            )
            exchanges.end_if_complete()
        self._counted += 1

    def _agree(self, label: float) -> None:
        """Agree on the share of the planned exchanges, as workers do every `PERIOD` units."""
        old, rate = self._agreement, self._strategy.rate
        self._agreement = old.renew(label, self._counted, old.edges, rate)
        if self._agreement.counted_from != old.counted_from:
            self._counted = 0
        if self._agreement.share != old.share:
            notice = max(NOTICE, NOTICE_S / self.unit_s)
            for member in self._members.values():
                member.state.change_mixing(label + notice, self._constants())


def _events_of(timeline: Timeline) -> list[Event]:
    """Return the events of a timeline in the order of their times."""
    counts = [0] * timeline.n
    gradients: list[Event] = []
    for worker, start_s, end_s in zip(
        timeline.gradient_worker.tolist(),
        timeline.gradient_start_s.tolist(),
        timeline.gradient_end_s.tolist(),
        strict=True,
    ):
        gradients.append(Event(start_s, BEGIN, worker, counts[worker]))
        gradients.append(Event(end_s, END, worker, counts[worker]))
        counts[worker] += 1
    starts_s, ends_s = timeline.exchange_start_s.tolist(), timeline.exchange_end_s.tolist()
    snapshots = [Event(at_s, SNAPSHOT, number) for number, at_s in enumerate(starts_s)]
    applied = [Event(at_s, APPLY, number) for number, at_s in enumerate(ends_s)]
    period_s = PERIOD * timeline.unit_s
    agreements = [
        Event(k * period_s, AGREEMENT, k)
        for k in range(math.floor(timeline.complete_s / period_s) + 1)
    ]
    return sorted([*gradients, *snapshots, *applied, *agreements])


class RehearsedGossipSession(GossipSession):
    """Session of a worker whose exchanges are events of simulated time or of a recorded order."""

    def __init__(
        self, job: TrainingJob, joined: GossipSetup, order: GossipOrder | GossipReplay
    ) -> None:
        super().__init__(job, joined, None)
        self._order, self._rank = order, job.cluster.control.rank

    def _begin_iteration(self) -> None:
        if not self._open:
            self._order.wait(self._rank, BEGIN)
        super()._begin_iteration()

    def _update(self, skip_update: bool) -> None:
        self._order.wait(self._rank, END)
        super()._update(skip_update)

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        self._require_untouched()
        self._open = False
        control = self._cluster.control
        assert isinstance(control, MemoryControl)
        control.meet("consolidate")
        t = self._order.label
        self._state.midpoint()
        buffers = [b.detach().double() for b in self._buffers()]
        numbers = [*(f.float() if f.itemsize < 4 else f for f in self._flats), *buffers]
        means = [torch.stack(control.share(n)).mean(0).reshape(-1) for n in numbers]
        count = len(self._flats)
        self._state.set_parameters(means[:count], t)
        self._untouched.note()
        self._set_buffers(means[count:])
        control.meet("the end of consolidate")

    def traffic(self) -> dict[str, int]:
        _, last = self._order.exchanges_of(self._rank)
        link = next(iter(self._cluster.links))
        return {link: sum(record.bytes for record in last)}

    def _leave(self) -> None:
        super()._leave()
        self._order.leave(self._rank)

    def _disconnect(self) -> None:
        if self._recorder is None:
            return
        counts, last = self._order.exchanges_of(self._rank)
        self._recorder.notes["gossip"] = {
            "exchanges": {str(peer): count for peer, count in counts.items()},
            "broken": 0,
            "exchange_s": sum(one.end_s - one.begin_s for one in last),
            "unit_s": self._order.unit_s,
            "origin_s": 0.0,
            "last": _recent(last),
        }


def _recent(records: Sequence[ExchangeRecord]) -> list[ExchangeRecord]:
    return list(records[-2048:])


def _open_order(
    strategy: GossipStrategy, profile: Profile, network: MemoryNetwork, fingerprint: str
) -> GossipOrder | GossipReplay:
    """Return the order of the events: a recorded one, or that of the simulator."""
    if network.recorded is not None:
        network.recorded.require_model(fingerprint)
        network.timeline = network.recorded.trace
        return GossipReplay(network.recorded, network.turns)
    order = GossipOrder(strategy, profile, network)
    network.timeline = lambda: order.trace(str(strategy), profile)
    return order


def open_rehearsed_session(strategy: GossipStrategy, job: TrainingJob) -> RehearsedGossipSession:
    """Return the session of a worker in a rehearsal.

    Raises:
        ValueError: exchanges would have to change weights within a forward, the graph is invalid,
            or an optimizer step of one parameter depends on other parameters.
    """
    cluster, profile = job.cluster, job.profile
    assert isinstance(cluster, MemoryCluster)
    assert profile is not None
    if strategy.weights != "snapshot":
        raise ValueError(SNAPSHOTS_ONLY)
    require_elementwise(job.optimizer)
    network, fingerprint = cluster.network, job.observation.model
    setup = GossipSetup(
        job.model,
        job.optimizer,
        strategy,
        fingerprint,
        cluster,
        state=State if network.recorded is None else ReplayedState,
    )
    order = network.shared.get(SHARED)
    if order is None:
        order = network.shared[SHARED] = _open_order(strategy, profile, network, fingerprint)
    setup.clock = Clock(own_s=lambda: order.now_s)
    setup.clock.set_unit(order.unit_s, since_s=0.0)
    session = RehearsedGossipSession(job, setup, order)
    order.join(cluster.control.rank, setup.state, Exchanges(setup.state, setup.wire))
    cluster.control.meet("the start of gossip")
    if job.recorder is not None:
        job.recorder.start(str(strategy), None, observed=0)
    return session
