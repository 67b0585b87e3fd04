"""Simulation engine for any plan: sends between two ranks, groups of ranks, rules of single ranks.

Each rank executes its program until it has to wait. A message starts when each of its ranks has
released it and has ended all earlier messages in its queue on that link. A receiver releases a
message at the start of the iteration. Hence the end of a message is computed as soon as its last
rank is ready. Coupled links, which slow each other down, are the only ones advanced in order of
time, and only while every rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from offbeat.core.plan import Transfer, groups_of
from offbeat.core.sim.fluid import Flow, Fluid
from offbeat.core.sim.job import Job, Run
from offbeat.core.sim.link_queue import (
    LinkQueue,
    deadlock_error,
    is_after_pause,
    undecided_vote_error,
)
from offbeat.core.sim.timed_program import Leg, Slot, VoteSlot


def run(job: Job) -> Run:
    """Simulate all ranks; raise ValueError if the plan deadlocks."""
    world = _World(job)
    world.run()
    workers = world.workers
    return Run(
        job,
        [worker.program for worker in workers],
        {name: [worker.queues[name] for worker in workers] for name in job.links},
        np.array([worker.ends_s[: job.iterations] for worker in workers]).T,
        np.array([worker.waited_s[: job.iterations] for worker in workers]).T,
        world.known_s,
    )


class _RankQueue(LinkQueue):
    """Messages of one rank on one link."""

    def __init__(self, name: str, pause_s: float | None, rank: int) -> None:
        super().__init__(name, pause_s)
        self.rank = rank
        self.flows: list[Flow] = []


class _World:
    """State of a simulation: all ranks, and the messages and votes between them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        everyone = tuple(range(job.profile.world_size))
        self._everyone = everyone
        self._groups = {
            link: {rank: group for group in groups_of(link, job.plan.groups) for rank in group}
            for link in job.plan.links
        }
        # Messages that at least one of their ranks has not yet queued.
        self._flows: dict[tuple[int, int, int], Flow] = {}
        self._costs: dict[tuple[int, int], tuple[float, float, float]] = {}
        # Links on which half of a send's latency is that of its request, which may be sent early.
        # On near links latency is no delay of the path.
        self._distant = {
            link for link in job.links if job.profile.link(link).pair_bytes_per_s is not None
        }
        self._ending: deque[tuple[Flow, float]] = deque()  # messages with their ends
        self._fluid = Fluid(job.profile)
        # Number of ranks that have voted and time of the last one, by vote and iteration.
        self._ballots: dict[tuple[str, int], tuple[int, float]] = {}
        self._listeners: dict[tuple[str, int], list[int]] = {}
        self._vote_s = job.costs.vote_s
        self.known_s: dict[tuple[str, int], float] = {}
        self.workers = [_Worker(rank, self) for rank in everyone]
        self.ready = deque(everyone)

    def run(self) -> None:
        """Simulate until all ranks have ended; raise ValueError if some rank waits forever."""
        lives = [worker.run_iterations() for worker in self.workers]
        while True:
            while self.ready:
                next(lives[self.ready.popleft()], None)
                self._end_messages()
            ended = self._fluid.advance()
            if ended is None:
                break
            self._ending.append(ended)
            self._end_messages()
        waiting = [w for w in self.workers if len(w.ends_s) < self.job.iterations]
        if waiting:
            raise min(waiting, key=lambda worker: len(worker.ends_s)).deadlock_error()

    # ---- messages ---------------------------------------------------------------------------

    def flow(self, t: Transfer, iteration: int, rank: int, *, is_on: bool) -> Flow:
        """Return the message of a rank. If a vote skips it (`is_on` is false), it takes no time."""
        ranks = t.ranks or self._groups[t.link].get(rank, self._everyone)
        key = id(t), iteration, ranks[0]
        flow = self._flows.get(key)
        if flow is None:
            seconds, rate_share, additional_s = self._message_costs(t, ranks)
            seconds = seconds * self.job.spread.factor(t, iteration) if is_on else 0.0
            sent = t.way is not None
            flow = Flow(t.link, ranks, seconds, seconds * rate_share, sent=sent)
            flow.additional_s = additional_s if seconds else 0.0
            self._flows[key] = flow
        flow.unseen -= 1
        if not flow.unseen:
            del self._flows[key]
        return flow

    def _message_costs(self, t: Transfer, ranks: tuple[int, ...]) -> tuple[float, float, float]:
        """Return the seconds of a message, the share that uses the rate, and the additional
        seconds after a pause."""
        key = id(t), ranks[0]
        if key not in self._costs:
            costs = self.job.costs
            self._costs[key] = costs.message_s(t, ranks), costs.rate_share(t), costs.additional_s(t)
        return self._costs[key]

    def mark_ready(self, flow: Flow, now_s: float, rank: int) -> None:
        """Record that a rank has released a message or that its queue has reached it.

        Start the message if it has no other missing condition.
        """
        flow.missing -= 1
        if now_s > flow.start_s:
            flow.start_s = now_s
        if flow.sent and rank == flow.ranks[1]:
            flow.requested_s = max(flow.requested_s, now_s)
        if not flow.missing:
            if flow.sent and flow.link in self._distant:
                early_s = flow.start_s - flow.requested_s
                flow.seconds -= min(early_s, (flow.seconds - flow.transfer_s) / 2)
            if flow.additional_s and is_after_pause(self.queues_of(flow), flow.start_s):
                flow.seconds += flow.additional_s
            if flow.link in self.job.coupled:
                self._fluid.add(flow)
            else:
                self._ending.append((flow, flow.start_s + flow.seconds))

    def _end_messages(self) -> None:
        """End the messages in `_ending` and move the next ones to the head of their queues."""
        while self._ending:
            flow, end_s = self._ending.popleft()
            flow.end_s = end_s
            for queue in self.queues_of(flow):
                queue.message_s[len(queue.ends_s)] = end_s - flow.start_s
                queue.ends_s.append(end_s)
                if flow.seconds:
                    queue.sent_s = end_s
                if len(queue.ends_s) < len(queue.flows):
                    self.mark_ready(queue.flows[len(queue.ends_s)], end_s, queue.rank)
            self.ready += flow.waiters

    def queues_of(self, flow: Flow) -> list[_RankQueue]:
        """Return the queue of each rank of a message."""
        return [self.workers[rank].queues[flow.link] for rank in flow.ranks]

    # ---- votes ------------------------------------------------------------------------------

    def cast_vote(self, name: str, iteration: int, now_s: float) -> None:
        """Record the vote of one rank. The outcome is known `vote_s` after the last rank's vote."""
        count, latest_s = self._ballots.get((name, iteration), (0, now_s))
        count, latest_s = count + 1, max(latest_s, now_s)
        self._ballots[name, iteration] = count, latest_s
        if count == len(self.workers):
            self.known_s[name, iteration] = latest_s + self._vote_s
            self.ready += self._listeners.pop((name, iteration), ())

    def add_vote_listener(self, name: str, iteration: int, rank: int) -> None:
        self._listeners.setdefault((name, iteration), []).append(rank)


class _Worker:
    """State of one rank.

    Attributes:
        ends_s: end of each simulated iteration.
        waited_s: seconds of waiting in each simulated iteration.
        blocked: message or vote that the rank waits for.
    """

    def __init__(self, rank: int, world: _World) -> None:
        self.rank, self.world = rank, world
        self.job = world.job
        self.program = world.job.program(rank)
        self.queues = {
            name: _RankQueue(name, world.job.pause_s(name), rank) for name in world.job.links
        }
        self.ends_s: list[float] = []
        self.waited_s: list[float] = []
        self.blocked: Slot | VoteSlot | None = None

    def run_iterations(self) -> Iterator[None]:
        """Simulate all iterations. Yield while the rank has to wait for a message or a vote."""
        job, now = self.job, 0.0
        for iteration in range(job.horizon):
            self._open_iteration(iteration, now)
            repeat = self.program.repeat_count(iteration)
            factors = job.factors.values(iteration, repeat)
            factor = factors if job.factors.alike else float(factors[self.rank])
            now += job.profile.other_s * repeat
            waited = 0.0
            for leg in self.program.legs(iteration):
                begun = now
                for slot in leg.due:
                    queue = self.queues[slot.link]
                    flow = queue.flows[queue.number(iteration, slot)]
                    while flow.end_s is None:
                        self.blocked = slot
                        flow.waiters.append(self.rank)
                        yield
                    now = max(now, flow.end_s)
                for cast_vote in leg.decided:
                    key = cast_vote.name, iteration - cast_vote.lag
                    while key not in self.world.known_s:
                        self.blocked = cast_vote
                        self.world.add_vote_listener(*key, self.rank)
                        yield
                    now = max(now, self.world.known_s[key])
                waited += now - begun
                self._release_leg(iteration, leg, now, factor)
                now += leg.seconds * factor
            self.ends_s.append(now)
            self.waited_s.append(waited)

    def _open_iteration(self, iteration: int, now: float) -> None:
        """Add the iteration's messages to their queues and release the received ones."""
        queues = self.program.queues(iteration)
        for link, queue in self.queues.items():
            transfers = queues.get(link, ())
            queue.open_iteration(transfers, [0.0] * len(transfers))
            for t in transfers:
                is_on = self.program.is_on(t, iteration)
                flow = self.world.flow(t, iteration, self.rank, is_on=is_on)
                queue.flows.append(flow)
                if len(queue.flows) == len(queue.ends_s) + 1:
                    self.world.mark_ready(flow, queue.free_s, self.rank)
                if t.only_receives(self.rank):
                    self.world.mark_ready(flow, now, self.rank)

    def _release_leg(self, iteration: int, leg: Leg, now: float, factor: float) -> None:
        for name, after_s in leg.cast_votes:
            self.world.cast_vote(name, iteration, now + after_s * factor)
        for link, released in leg.released.items():
            queue = self.queues[link]
            begin = queue.begins[iteration]
            for position, seconds in zip(released.positions, released.after_s, strict=True):
                flow = queue.flows[begin + position]
                self.world.mark_ready(flow, now + seconds * factor, self.rank)

    def deadlock_error(self) -> ValueError:
        """Return the error that names the message or vote for which the rank waits forever."""
        iteration, blocked = len(self.ends_s), self.blocked
        assert blocked is not None
        if isinstance(blocked, VoteSlot):
            return undecided_vote_error(self.program, iteration, blocked.name)
        queue = self.queues[blocked.link]
        flow = queue.flows[queue.number(iteration, blocked)]
        queues = self.world.queues_of(flow)
        heads = [queue.head() for queue in queues if len(queue.ends_s) < len(queue.flows)]
        return deadlock_error(self.program, iteration, blocked, heads)
