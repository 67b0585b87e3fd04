"""Parameter servers in a rehearsal that repeats the pushes and answers of a recorded job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.runtime.event_log import Event
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.rehearsal.recorded_order import Queues, RecordedOrder
from offbeat.rehearsal.turns import Turns
from offbeat.server.client import ARRIVED
from offbeat.server.layout import Layout
from offbeat.server.optimizers import Settings
from offbeat.server.service import ADVANCE, ANSWER, FLUSH, JOIN, LEAVE, PUSH
from offbeat.server.strategies import SSP

Values = dict[torch.dtype, Tensor]
Polls = deque[tuple[str, int]]  # results of looking for parameters, each with its repetitions


@dataclass
class _Traffic:
    """Messages between one worker and the servers.

    Attributes:
        clock: clock of the last push.
        push: gradients of this clock, settings and absent parameters; gradients are None for a
            clock without them.
        pending: shards whose server has not received the push.
        missing: shards whose parameters the pull still lacks; None without a pull.
        low: lowest clock of the answers to the pull.
        polls: recorded results of looking for parameters.
    """

    clock: int = -1
    push: tuple[Values | None, Settings, Sequence[int]] | None = None
    pending: set[int] = field(default_factory=set)
    missing: set[int] | None = None
    low: int = 0
    polls: Polls = field(default_factory=deque)


class ServedReplay:
    """Pushes, answers and steps of all servers, in the recorded order of each server.

    A push waits for its worker, and an answer for a pull.

    Args:
        strategy: strategy of the job.
        job: objects of one worker, whose parameters are those of all workers.
        layout: places of the parameters.
        order: recorded order.
        turns: turns of the workers.
    """

    def __init__(
        self, strategy: SSP, job: TrainingJob, layout: Layout, order: RecordedOrder, turns: Turns
    ) -> None:
        self.turns, self._layout, self._order, self._now_s = turns, layout, order, 0.0
        self._stores = {
            rank: strategy.make_store(layout, server, job.optimizer, job.ranks.workers)
            for server, rank in enumerate(job.ranks.servers)
        }
        for store in self._stores.values():
            store.use_clock(lambda: self._now_s)
        self.shards = {n: s for store in self._stores.values() for n, s in store.shards.items()}
        self._traffic = [
            _Traffic(polls=deque((kind, int(values[0]) if values else 1) for kind, values in log))
            for log in order.logs[: order.ranks]
        ]
        self._arrived = [layout.flats() for _ in self._traffic]
        self._queues = Queues(order, job.ranks.servers, {}, self._run, turns)
        self._run_by_kind: Mapping[str, Callable[[int, tuple[float, ...]], bool]] = {
            PUSH: self._push,
            JOIN: self._join,
            LEAVE: self._leave,
            ADVANCE: self._advance,
            FLUSH: self._flush,
            ANSWER: self._answer,
        }

    # ---- called by workers ------------------------------------------------------------------

    def wait(self, worker: int, kind: int) -> None:
        """Return at once: the recorded order has no events of computation."""

    def push(
        self,
        worker: int,
        clock: int,
        values: Values | None,
        settings: Settings,
        absent: Sequence[int],
    ) -> None:
        """Send gradients of a clock to the servers. `values` None: there are none."""
        traffic = self._traffic[worker]
        traffic.clock, traffic.push = clock, (values, settings, absent)
        traffic.pending = set(self.shards)

    def is_taken(self, worker: int) -> bool:
        """Return whether the last push of a worker has arrived at all servers."""
        self._queues.advance()
        return not self._traffic[worker].pending

    def pull(self, worker: int, need: int) -> None:
        """Request parameters. The recorded answers are new enough."""
        self._traffic[worker].missing = set(self.shards)

    def arrived_parameters(self, worker: int) -> tuple[int, Values] | None:
        """Return the parameters that have arrived at a worker, with their clock."""
        self._queues.advance()
        traffic = self._traffic[worker]
        return (traffic.low, self._arrived[worker]) if traffic.missing == set() else None

    def has_arrived(self, worker: int) -> bool:
        """Return whether parameters had arrived when the recorded worker looked for them.

        Raises:
            ValueError: the recorded worker has not looked for parameters that often.
        """
        polls = self._traffic[worker].polls
        if not polls:
            raise ValueError(
                f"script must make the calls of the recorded job: rank {worker} pulls more often "
                f"than in order ({self._order.folder}); train {self._order.iterations} iterations "
                "with the recorded script"
            )
        kind, times = polls.popleft()
        if times > 1:
            polls.appendleft((kind, times - 1))
        return kind == ARRIVED

    def release(self, worker: int) -> None:
        """Consume the parameters that have arrived at a worker."""
        self._traffic[worker].missing = None

    def is_pulling(self, worker: int) -> bool:
        """Return whether a pull is under way or not consumed yet."""
        return self._traffic[worker].missing is not None

    def flush(self) -> None:
        """Return at once: the recorded order has the steps after a meeting."""

    def leave(self, worker: int) -> None:
        """Return at once: the recorded order has the ends of the workers."""

    # ---- events -----------------------------------------------------------------------------

    def _run(self, server: int, event: Event) -> bool:
        kind, values = event
        return self._run_by_kind[kind](server, values)

    def _push(self, server: int, values: tuple[float, ...]) -> bool:
        worker, number, clock = map(int, values[:3])
        traffic = self._traffic[worker]
        if traffic.clock != clock or number not in traffic.pending:
            return False
        assert traffic.push is not None
        self._now_s = values[3]
        self.shards[number].receive(worker, clock, *traffic.push)
        traffic.pending.discard(number)
        return True

    def _join(self, server: int, values: tuple[float, ...]) -> bool:
        worker, clock, self._now_s = int(values[0]), int(values[1]), values[2]
        self._stores[server].join(worker, clock)
        return True

    def _leave(self, server: int, values: tuple[float, ...]) -> bool:
        worker, self._now_s = int(values[0]), values[1]
        self._stores[server].leave(worker)
        return True

    def _advance(self, server: int, values: tuple[float, ...]) -> bool:
        [self._now_s] = values
        self._stores[server].advance()
        return True

    def _flush(self, server: int, values: tuple[float, ...]) -> bool:
        [self._now_s] = values
        self._stores[server].flush()
        return True

    def _answer(self, server: int, values: tuple[float, ...]) -> bool:
        worker, number, clock = map(int, values)
        traffic = self._traffic[worker]
        if traffic.missing is None or number not in traffic.missing:
            return False
        traffic.low = clock if len(traffic.missing) == len(self.shards) else min(clock, traffic.low)
        traffic.missing.discard(number)
        self.shards[number].send(self._arrived[worker])
        return True
