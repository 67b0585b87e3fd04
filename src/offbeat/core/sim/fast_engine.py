"""Fast simulation engine for uniform plans: equal rules on all ranks, messages between all ranks.

One program represents all ranks. Each link serves its messages in a fixed order, so no event queue
is needed. Only links that slow each other down are advanced in order of time. Messages between the
ranks of a replica (link `INSIDE`) involve this replica alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import INSIDE, base_link
from offbeat.core.sim.fluid import Flow, Fluid
from offbeat.core.sim.job import Job, Run, Times
from offbeat.core.sim.link_queue import (
    LinkQueue,
    deadlock_error,
    is_after_pause,
    undecided_vote_error,
)
from offbeat.core.sim.timed_program import Leg, Slot


def run(job: Job) -> Run:
    """Simulate all ranks; raise ValueError if the plan deadlocks."""
    ranks = _AllRanks(job)
    ranks.run()
    queues = {name: queue.rows() for name, queue in ranks.queues.items()}
    ends_s, waited_s = (
        _as_rows(times[: job.iterations]) for times in (ranks.ends_s, ranks.waited_s)
    )
    return Run(job, [ranks.program], queues, ends_s, waited_s, ranks.known_s)


class SharedQueue(LinkQueue):
    """Queue of a link whose messages involve all ranks and end on all ranks at the same time.

    A message starts when the last rank has released it and the link is free.

    Attributes:
        costs: times of messages.
        fluid: model that determines the ends of messages if the link is coupled, otherwise None.
        released_s: release of each message that has not started, by message number.
    """

    def __init__(self, name: str, job: Job, fluid: Fluid | None) -> None:
        super().__init__(name, job.pause_s(name))
        self.costs, self.fluid = job.costs, fluid
        self.released_s: dict[int, float] = {}

    def end_s(self, number: int) -> float | None:
        """Return the end of a message, or None while it or an earlier message is not released."""
        if len(self.ends_s) <= number:
            self.run_released()
        return self.ends_s[number] if number < len(self.ends_s) else None

    def run_released(self) -> None:
        """Compute the ends of all released messages, in order. On a coupled link, start the
        first."""
        ends_s, released_s, message_s = self.ends_s, self.released_s, self.message_s
        number, free_s = len(ends_s), self.free_s
        while (start_s := released_s.pop(number, None)) is not None:
            start_s = start_s if start_s > free_s else free_s
            if self.fluid is not None:
                self.fluid.add(self._flow(number, start_s))
                return
            if self.pause_s is not None and message_s[number]:
                message_s[number] += self._additional_s(number, start_s)
                self.sent_s = start_s + message_s[number]
            free_s = start_s + message_s[number]
            ends_s.append(free_s)
            number += 1

    def _flow(self, number: int, start_s: float) -> Flow:
        seconds = self.message_s[number]
        transfer_s = seconds * self.costs.rate_share(self.transfers[number])
        if seconds:
            seconds += self._additional_s(number, start_s)
        return Flow(self.name, (0,), seconds, transfer_s, start_s=start_s)

    def _additional_s(self, number: int, start_s: float) -> float:
        paused = is_after_pause((self,), start_s)
        return self.costs.additional_s(self.transfers[number]) if paused else 0.0

    def end_message(self, flow: Flow, end_s: float) -> None:
        """Record the end of the first message of a coupled link, and start the next one."""
        self.message_s[len(self.ends_s)] = end_s - flow.start_s
        self.ends_s.append(end_s)
        if flow.seconds:
            self.sent_s = end_s
        self.run_released()

    def rows(self) -> list[LinkQueue]:
        """Return the queue of each rank, or one that represents all ranks."""
        return [self]

    def releases_s(self, released_s: NDArray[np.float64]) -> list[Times]:
        """Return when messages are released, given the times of each rank, `[message, rank]`."""
        return np.maximum.reduce(released_s, axis=1).tolist()


class SeparateQueues(SharedQueue):
    """Queues of a link on which each rank is a group of its own, for ranks that differ in time.

    Times are arrays with one value per rank.
    """

    def __init__(self, name: str, job: Job) -> None:
        super().__init__(name, job, None)
        self._ranks = job.profile.world_size

    def run_released(self) -> None:
        number = len(self.ends_s)
        while (start_s := self.released_s.pop(number, None)) is not None:
            self.ends_s.append(np.maximum(start_s, self.free_s) + self.message_s[number])
            number += 1

    def rows(self) -> list[LinkQueue]:
        rows = []
        for ends_s in np.array(self.ends_s).reshape(-1, self._ranks).T.tolist():
            row = LinkQueue(self.name)
            row.begins, row.transfers, row.message_s = self.begins, self.transfers, self.message_s
            row.ends_s = ends_s
            rows.append(row)
        return rows

    def releases_s(self, released_s: NDArray[np.float64]) -> list[Times]:
        return list(released_s)


class _AllRanks:
    """State of all ranks.

    Attributes:
        ends_s: end of each simulated iteration.
        waited_s: seconds of waiting in each simulated iteration.
        known_s: time at which the outcome of a vote is known, by name and iteration.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.program = job.program()
        self._fluid = Fluid(job.profile)
        self.queues = {name: self._create_queue(name) for name in job.links}
        self.ends_s: list[Times] = []
        self.waited_s: list[Times] = []
        self.known_s: dict[tuple[str, int], float] = {}
        self._message_s: dict[int, dict[str, list[float]]] = {}

    def _create_queue(self, name: str) -> SharedQueue:
        job = self.job
        if base_link(name) == INSIDE and job.plan.groups and not job.factors.alike:
            return SeparateQueues(name, job)
        return SharedQueue(name, job, self._fluid if name in job.coupled else None)

    def run(self) -> None:
        job, alike = self.job, self.job.factors.alike
        none: Times = 0.0 if alike else np.zeros(job.profile.world_size)
        now = none
        for iteration in range(job.horizon):
            self._open_iteration(iteration)
            repeat = self.program.repeat_count(iteration)
            factor = job.factors.values(iteration, repeat)
            now = now + job.profile.other_s * repeat
            waited = none
            for leg in self.program.legs(iteration):
                if leg.due or leg.decided:
                    begun = now
                    try:
                        now = self._wait(iteration, leg, now)
                    except ValueError:
                        if iteration < job.iterations:
                            raise
                        return  # only an iteration of the horizon is incomplete
                    waited = waited + (now - begun)
                if leg.released or leg.cast_votes:
                    self._release_leg(iteration, leg, now, factor)
                now = now + leg.seconds * factor
            self.ends_s.append(now)
            self.waited_s.append(waited)
        self._advance_coupled()  # messages for which no rank has waited

    def _open_iteration(self, iteration: int) -> None:
        """Add the iteration's messages to their queues."""
        seconds, queues = self._message_seconds(iteration), self.program.queues(iteration)
        for name, queue in self.queues.items():
            queue.open_iteration(queues.get(name, ()), seconds.get(name, ()))

    def _message_seconds(self, iteration: int) -> dict[str, list[float]]:
        """Return the seconds of every message by link. A message that a vote skips takes 0 s."""
        program, segment = self.program, self.program.program.segment(iteration)
        queues = program.queues(iteration)
        if segment not in self._message_s:
            self._message_s[segment] = {
                link: [self.job.costs.message_s(t) for t in queue] for link, queue in queues.items()
            }
        seconds, spread = self._message_s[segment], self.job.spread
        if not (self.job.plan.votes or spread.any):
            return seconds
        return {
            link: [
                s * spread.factor(t, iteration) * program.is_on(t, iteration)
                for s, t in zip(seconds[link], queue, strict=True)
            ]
            for link, queue in queues.items()
        }

    def _wait(self, iteration: int, leg: Leg, now: Times) -> Times:
        later = max if self.job.factors.alike else np.maximum
        for slot in leg.due:
            now = later(now, self._end_s(iteration, slot))
        for name, lag in leg.decided:
            known_s = self.known_s.get((name, iteration - lag))
            if known_s is None:
                raise undecided_vote_error(self.program, iteration, name)
            now = later(now, known_s)
        return now

    def _end_s(self, iteration: int, slot: Slot) -> float:
        queue = self.queues[slot.link]
        number = queue.number(iteration, slot)
        end_s = queue.end_s(number)
        if end_s is None and queue.fluid is not None:
            self._advance_coupled(queue, number)
            end_s = queue.end_s(number)
        if end_s is None:
            raise deadlock_error(self.program, iteration, slot, [queue.head()])
        return end_s

    def _advance_coupled(self, awaited: SharedQueue | None = None, number: int = 0) -> None:
        """Advance the coupled links until a message of a queue ends, or until no message can run.

        All ranks wait for this message, so no message is released before it ends.
        """
        for queue in self.queues.values():
            queue.run_released()
        while awaited is None or len(awaited.ends_s) <= number:
            ended = self._fluid.advance()
            if ended is None:
                return
            flow, end_s = ended
            self.queues[flow.link].end_message(flow, end_s)

    def _release_leg(self, iteration: int, leg: Leg, now: Times, factor: Times) -> None:
        """Record the votes and releases of a leg at the times of the last rank."""
        for name, after_s in leg.cast_votes:
            last_s = float(np.max(now + after_s * factor))
            self.known_s[name, iteration] = last_s + self.job.costs.vote_s
        for link, released in leg.released.items():
            queue = self.queues[link]
            if not self.job.factors.alike:
                last_s = queue.releases_s(now + released.column_s * factor)
            else:
                last_s = [now + seconds * factor for seconds in released.after_s]
            begin = queue.begins[iteration]
            numbers = [begin + position for position in released.positions]
            queue.released_s.update(zip(numbers, last_s, strict=True))


def _as_rows(times: list[Times]) -> NDArray[np.float64]:
    """Return times `[iteration, rank]`, or `[iteration, 1]` if all ranks are alike."""
    rows = np.array(times, dtype=np.float64)
    return rows if rows.ndim == 2 else rows[:, None]
