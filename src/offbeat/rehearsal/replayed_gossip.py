"""Gossip in a rehearsal that repeats the exchanges of a recorded job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from offbeat.core.runtime.event_log import Event
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.exchange import ExchangeRecord, Exchanges
from offbeat.gossip.state import (
    ABORT,
    APPLY,
    CHANGE,
    MIDPOINT,
    MIX,
    REFRESH,
    SET,
    SETTLE,
    SNAPSHOT,
    STEP,
    Mixing,
    State,
)
from offbeat.rehearsal.recorded_order import Queues, RecordedOrder
from offbeat.rehearsal.turns import Turns

AWAITED = MappingProxyType(
    {
        REFRESH: "the begin of a forward",
        STEP: "a step of the optimizer",
        MIDPOINT: "model.consolidate()",
        SET: "new parameters",
    }
)


class ReplayedState(State):
    """State of a worker whose events have the recorded order and labels."""

    _replay: GossipReplay
    _worker: int

    def attach(self, replay: GossipReplay, worker: int) -> None:
        """Take order and labels from a replay."""
        self._replay, self._worker = replay, worker

    def step(self, t: float, update: Callable[[], None]) -> None:
        [t] = self._replay.take(self._worker, STEP)
        super().step(t, update)

    def refresh(self) -> None:
        self._replay.take(self._worker, REFRESH)
        super().refresh()

    def midpoint(self) -> None:
        self._replay.take(self._worker, MIDPOINT)
        super().midpoint()

    def set_parameters(self, x: Sequence[Tensor], t: float) -> None:
        [t] = self._replay.take(self._worker, SET)
        super().set_parameters(x, t)

    def mix_until(self, t: float) -> None:
        """Wait until the recorded job has mixed. If it has not, only write x to the weights."""
        if not self._replay.await_mixing(self._worker):
            super().refresh()

    def mix_at(self, t: float) -> None:
        """Mix up to a recorded label."""
        super().mix_until(t)


@dataclass
class _Member:
    """One worker: its parameters, its exchanges, and its completed exchanges by partner."""

    state: ReplayedState
    exchanges: Exchanges
    counts: dict[int, int] = field(default_factory=dict)
    last: list[ExchangeRecord] = field(default_factory=list)


class GossipReplay:
    """Gradients and exchanges of all workers, in the recorded order of each of them.

    A chunk of an exchange waits for the copy that the partner sends. Events of different workers
    have no other order, so copies are kept until the partner has begun another exchange.

    Attributes:
        now_s: 0, as the clock of a worker is not used.
        label: 0, as events have the recorded labels.
        unit_s: mean seconds of a gradient in the recorded job.

    Args:
        order: recorded order.
        turns: turns of the workers.
    """

    now_s = label = 0.0

    def __init__(self, order: RecordedOrder, turns: Turns) -> None:
        self.unit_s, self._turns = order.iteration_s or 1.0, turns
        self._queues = Queues(order, range(order.ranks), AWAITED, self._run, turns)
        self._members: dict[int, _Member] = {}
        self._mixed = [0] * order.ranks  # mixings that have run, by worker
        # Sent chunks by sender, receiver and number of the exchange.
        self._sent: dict[tuple[int, int, int], list[bytes]] = {}
        self._run_by_kind: Mapping[str, Callable[[int, tuple[float, ...]], bool]] = {
            CHANGE: self._change_mixing,
            MIX: self._mix,
            SNAPSHOT: self._begin_exchange,
            APPLY: self._apply_chunks,
            ABORT: self._abort_exchange,
            SETTLE: self._revert_exchange,
        }

    # ---- called by workers ------------------------------------------------------------------

    def join(self, worker: int, state: State, exchanges: Exchanges) -> None:
        """Add a worker. All workers must join before the first event."""
        assert isinstance(state, ReplayedState)
        state.attach(self, worker)
        self._members[worker] = _Member(state, exchanges)

    def wait(self, worker: int, kind: int) -> None:
        """Return at once: the state of the worker waits for its events."""

    def leave(self, worker: int) -> None:
        """Return at once: events of the worker go on until the others have ended."""

    def take(self, worker: int, kind: str) -> tuple[float, ...]:
        """Wait for an event of a worker, and return its values."""
        return self._queues.take(worker, kind)

    def await_mixing(self, worker: int) -> bool:
        """Wait for the mixing before the next awaited event. Return whether there is one."""
        if not self._queues.has_before_next(worker, MIX):
            return False
        count = self._mixed[worker]
        self._turns.wait_until(
            lambda: self._has_mixed(worker, count), lambda: "exchanges before it mixes"
        )
        return True

    def _has_mixed(self, worker: int, count: int) -> bool:
        self._queues.advance()
        return self._mixed[worker] > count

    def exchanges_of(self, worker: int) -> tuple[dict[int, int], list[ExchangeRecord]]:
        """Return the completed exchanges of a worker: counts by partner, and none with its time."""
        member = self._members[worker]
        return member.counts, member.last

    # ---- events -----------------------------------------------------------------------------

    def _run(self, worker: int, event: Event) -> bool:
        kind, values = event
        return self._run_by_kind[kind](worker, values)

    def _change_mixing(self, worker: int, values: tuple[float, ...]) -> bool:
        label, *constants = values
        self._members[worker].state.change_mixing(label, Mixing(*constants))
        return True

    def _mix(self, worker: int, values: tuple[float, ...]) -> bool:
        self._members[worker].state.mix_at(*values)
        self._mixed[worker] += 1
        return True

    def _begin_exchange(self, worker: int, values: tuple[float, ...]) -> bool:
        label, partner, number, alpha, alpha_tilde, coded = values
        exchanges = self._members[worker].exchanges
        chunks = range(len(exchanges.wire.chunks))
        if (now := exchanges.now) is not None:  # complete, as a worker has one exchange at a time
            now.confirmed = True
            exchanges.end_if_complete()
            self._sent.pop((now.partner, worker, now.number), None)
        mixing = Mixing(0.0, alpha, alpha_tilde)  # an exchange does not use eta
        exchanges.begin(int(partner), int(number), label, mixing, coded=bool(coded))
        key = worker, int(partner), int(number)
        self._sent[key] = [bytes(exchanges.data(chunk)) for chunk in chunks]
        return True

    def _apply_chunks(self, worker: int, values: tuple[float, ...]) -> bool:
        member = self._members[worker]
        now = member.exchanges.now
        assert now is not None
        sent = self._sent.get((now.partner, worker, now.number))
        if sent is None:
            return False
        for _ in range(int(values[0])):
            member.exchanges.buffer(now.arrived)[:] = sent[now.arrived]
            member.exchanges.apply_chunk()
        if now.arrived == len(sent):
            member.counts[now.partner] = member.counts.get(now.partner, 0) + 1
        return True

    def _abort_exchange(self, worker: int, values: tuple[float, ...]) -> bool:
        exchanges, partner = self._members[worker].exchanges, int(values[0])
        assert exchanges.now is not None
        self._sent.pop((partner, worker, exchanges.now.number), None)
        exchanges.abort(partner)
        return True

    def _revert_exchange(self, worker: int, values: tuple[float, ...]) -> bool:
        self._members[worker].exchanges.settle(int(values[0]), NEVER)
        return True
