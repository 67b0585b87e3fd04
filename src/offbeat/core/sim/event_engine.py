"""Engine for any plan: sends between two ranks, groups of ranks, rules of single ranks.

Every rank goes through its own program as far as it can. A message starts when each of its ranks
has released it and comes to it in its line on that link (a receiver has released it when its
iteration begins). So its end is known as soon as the last of them is. Only links that slow each
other down are advanced in the order of time, and only when every rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from offbeat.core.plan import Transfer, groups_of
from offbeat.core.sim.fluid import Flow, Fluid
from offbeat.core.sim.job import Job, Run
from offbeat.core.sim.lines import Line, stuck, undecided
from offbeat.core.sim.timed_program import Leg, Say, Slot


def run(job: Job) -> Run:
    """All ranks' iterations; ValueError if they can never proceed."""
    world = _World(job)
    world.run()
    workers = world.workers
    return Run(
        job,
        [worker.program for worker in workers],
        {name: [worker.lines[name] for worker in workers] for name in job.links},
        np.array([worker.ends_s[: job.iterations] for worker in workers]).T,
        np.array([worker.waited_s[: job.iterations] for worker in workers]).T,
        world.known_s,
    )


class _Queue(Line):
    """One rank's messages on one link."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.flows: list[Flow] = []


class _World:
    """All ranks, and the messages and votes between them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        everyone = tuple(range(job.profile.world_size))
        self._everyone = everyone
        self._groups = {
            link: {rank: group for group in groups_of(link, job.plan.groups) for rank in group}
            for link in job.plan.links
        }
        self._flows: dict[tuple[int, int, int], Flow] = {}  # not numbered by all ranks yet
        self._landing: deque[tuple[Flow, float]] = deque()
        self._fluid = Fluid(job.profile)
        self._said: dict[tuple[str, int], tuple[int, float]] = {}  # by how many, when last
        self._listeners: dict[tuple[str, int], list[int]] = {}
        self._vote_s = job.costs.vote_s
        self.known_s: dict[tuple[str, int], float] = {}
        self.workers = [_Worker(rank, self) for rank in everyone]
        self.ready = deque(everyone)

    def run(self) -> None:
        """Until all are done, or nothing moves any more."""
        lives = [worker.live() for worker in self.workers]
        while True:
            while self.ready:
                next(lives[self.ready.popleft()], None)
                self._land()
            ended = self._fluid.advance()
            if ended is None:
                break
            self._landing.append(ended)
            self._land()
        waiting = [w for w in self.workers if len(w.ends_s) < self.job.iterations]
        if waiting:
            raise min(waiting, key=lambda worker: len(worker.ends_s)).stuck()

    # ---- messages ---------------------------------------------------------------------------

    def ranks_of(self, t: Transfer, rank: int) -> tuple[int, ...]:
        """Ranks of a message of this rank."""
        return t.ranks or self._groups[t.link].get(rank, self._everyone)

    def flow(self, t: Transfer, iteration: int, rank: int, *, goes: bool) -> Flow:
        """A rank's message; one that a vote passes over takes no time."""
        ranks = self.ranks_of(t, rank)
        key = id(t), iteration, ranks[0]
        flow = self._flows.get(key)
        if flow is None:
            seconds = self.job.costs.message_s(t, ranks) if goes else 0.0
            seconds *= self.job.spread.factor(t, iteration)
            flow = self._flows[key] = Flow(t.link, ranks, seconds, sent=t.ranks is not None)
        flow.unseen -= 1
        if not flow.unseen:
            del self._flows[key]
        return flow

    def arrive(self, flow: Flow, now_s: float) -> None:
        """One of its ranks releases a message, or comes to it in its line."""
        flow.missing -= 1
        if now_s > flow.start_s:
            flow.start_s = now_s
        if not flow.missing:
            if flow.link in self.job.coupled:
                self._fluid.add(flow)
            else:
                self._landing.append((flow, flow.start_s + flow.seconds))

    def _land(self) -> None:
        """End messages, and let those behind them come to the head of their lines."""
        while self._landing:
            flow, end_s = self._landing.popleft()
            flow.end_s = end_s
            for rank in flow.ranks:
                queue = self.workers[rank].lines[flow.link]
                queue.message_s[len(queue.ends_s)] = end_s - flow.start_s
                queue.ends_s.append(end_s)
                if len(queue.ends_s) < len(queue.flows):
                    self.arrive(queue.flows[len(queue.ends_s)], end_s)
            self.ready += flow.waiters

    # ---- votes ------------------------------------------------------------------------------

    def say(self, name: str, iteration: int, now_s: float) -> None:
        """One rank has its say; with the last one's the outcome will be known."""
        count, latest_s = self._said.get((name, iteration), (0, now_s))
        count, latest_s = count + 1, max(latest_s, now_s)
        self._said[name, iteration] = count, latest_s
        if count == len(self.workers):
            self.known_s[name, iteration] = latest_s + self._vote_s
            self.ready += self._listeners.pop((name, iteration), ())

    def listen(self, name: str, iteration: int, rank: int) -> None:
        self._listeners.setdefault((name, iteration), []).append(rank)


class _Worker:
    """One rank; `ends_s` and `waited_s` grow by one entry per iteration."""

    def __init__(self, rank: int, world: _World) -> None:
        self.rank, self.world = rank, world
        self.job = world.job
        self.program = world.job.program(rank)
        self.lines = {name: _Queue(name) for name in world.job.links}
        self.ends_s: list[float] = []
        self.waited_s: list[float] = []
        self.blocked: Slot | Say | None = None

    def live(self) -> Iterator[None]:
        """Run all iterations; yields whenever it is blocked, and goes on when resumed."""
        job, now = self.job, 0.0
        for iteration in range(job.horizon):
            self._open(iteration, now)
            repeat = self.program.repeat(iteration)
            factors = job.factors.of(iteration, repeat)
            factor = factors if job.factors.alike else float(factors[self.rank])
            now += job.profile.other_s * repeat
            waited = 0.0
            for leg in self.program.legs(iteration):
                begun = now
                for slot in leg.due:
                    queue = self.lines[slot.link]
                    flow = queue.flows[queue.number(iteration, slot)]
                    while flow.end_s is None:
                        self.blocked = slot
                        flow.waiters.append(self.rank)
                        yield
                    now = max(now, flow.end_s)
                for say in leg.decided:
                    key = say.name, iteration - say.lag
                    while key not in self.world.known_s:
                        self.blocked = say
                        self.world.listen(*key, self.rank)
                        yield
                    now = max(now, self.world.known_s[key])
                waited += now - begun
                self._leave(iteration, leg, now, factor)
                now += leg.seconds * factor
            self.ends_s.append(now)
            self.waited_s.append(waited)

    def _open(self, iteration: int, now: float) -> None:
        """Number the iteration's messages on their lines; what is received may come."""
        queues = self.program.queues(iteration)
        for link, queue in self.lines.items():
            transfers = queues.get(link, ())
            queue.open([0.0] * len(transfers))
            for t in transfers:
                goes = self.program.goes(t, iteration)
                flow = self.world.flow(t, iteration, self.rank, goes=goes)
                queue.flows.append(flow)
                if len(queue.flows) == len(queue.ends_s) + 1:
                    self.world.arrive(flow, queue.free_s)
                if t.ranks is not None and t.ranks[1] == self.rank:
                    self.world.arrive(flow, now)

    def _leave(self, iteration: int, leg: Leg, now: float, factor: float) -> None:
        for name, after_s in leg.asked:
            self.world.say(name, iteration, now + after_s * factor)
        for link, positions, after_s, _ in leg.released:
            queue = self.lines[link]
            begin = queue.begins[iteration]
            for position, seconds in zip(positions, after_s, strict=True):
                self.world.arrive(queue.flows[begin + position], now + seconds * factor)

    def stuck(self) -> ValueError:
        """What it waits for for ever."""
        iteration, blocked = len(self.ends_s), self.blocked
        assert blocked is not None
        if isinstance(blocked, Say):
            return undecided(self.program, iteration, blocked.name)
        queue = self.lines[blocked.link]
        flow = queue.flows[queue.number(iteration, blocked)]
        workers = [self.world.workers[rank] for rank in flow.ranks]
        lines = [(w, w.lines[blocked.link]) for w in workers]
        heads = [q.head(w.program) for w, q in lines if len(q.ends_s) < len(q.flows)]
        return stuck(self.program, iteration, blocked, heads)
