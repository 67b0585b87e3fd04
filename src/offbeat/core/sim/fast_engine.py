"""Engine for plans in which all ranks do the same and every message is of all of them: fast.

All ranks go through one program together. Links serve in a fixed order, so no event queue is
needed. Only links that slow each other down move in the order of time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.core.sim.job import Job, Run, Times
from offbeat.core.sim.lines import SharedLine, stuck, undecided
from offbeat.core.sim.shared import Shared
from offbeat.core.sim.timed_program import Leg, Slot


def run(job: Job) -> Run:
    """All ranks' iterations; ValueError if they can never proceed."""
    together = _Together(job)
    together.run()
    lines = {name: [line] for name, line in together.lines.items()}
    ends_s, waited_s = (
        _rows(times[: job.iterations]) for times in (together.ends_s, together.waited_s)
    )
    return Run(job, [together.program], lines, ends_s, waited_s, together.known_s)


class _Together:
    """All ranks; `ends_s` and `waited_s` grow by one entry per iteration."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.program = job.program()
        self.lines = {name: SharedLine(name, coupled=name in job.coupled) for name in job.links}
        coupled = [line for line in self.lines.values() if line.coupled]
        self.shared = Shared(coupled, job.profile)
        self.ends_s: list[Times] = []
        self.waited_s: list[Times] = []
        self.known_s: dict[tuple[str, int], float] = {}
        self._message_s: dict[int, dict[str, list[float]]] = {}

    def run(self) -> None:
        job, alike = self.job, self.job.factors.alike
        none: Times = 0.0 if alike else np.zeros(job.profile.world_size)
        now = none
        for iteration in range(job.horizon):
            self._open(iteration)
            repeat = self.program.repeat(iteration)
            factor = job.factors.of(iteration, repeat)
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
                        return  # beyond the iterations that were asked for
                    waited = waited + (now - begun)
                if leg.released or leg.asked:
                    self._leave(iteration, leg, now, factor)
                now = now + leg.seconds * factor
            self.ends_s.append(now)
            self.waited_s.append(waited)
        for line in self.lines.values():
            line.issue()  # what nobody has waited for yet
        self.shared.advance()

    def _open(self, iteration: int) -> None:
        """Number the iteration's messages on their lines."""
        seconds = self._seconds(iteration)
        for name, line in self.lines.items():
            line.open(seconds.get(name, ()))

    def _seconds(self, iteration: int) -> dict[str, list[float]]:
        """Of every message by link; one that a vote passes over takes no time."""
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
                s * spread.factor(t, iteration) * program.goes(t, iteration)
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
                raise undecided(self.program, iteration, name)
            now = later(now, known_s)
        return now

    def _end_s(self, iteration: int, slot: Slot) -> float:
        line = self.lines[slot.link]
        number = line.number(iteration, slot)
        end_s = line.end_s(number)
        # Nobody releases anything before the end that all wait for: up to there the coupled
        # links can run.
        if end_s is None and line.coupled and self.shared.advance((line.name, number)):
            end_s = line.end_s(number)
        if end_s is None:
            raise stuck(self.program, iteration, slot, [line.head(self.program)])
        return end_s

    def _leave(self, iteration: int, leg: Leg, now: Times, factor: Times) -> None:
        """Votes and releases of a leg, when the last rank comes by."""
        for name, after_s in leg.asked:
            last_s = float(np.max(now + after_s * factor))
            self.known_s[name, iteration] = last_s + self.job.costs.vote_s
        for link, positions, after_s, column_s in leg.released:
            if not self.job.factors.alike:
                last_s = (now + column_s * factor).max(axis=1).tolist()
            else:
                last_s = [now + seconds * factor for seconds in after_s]
            line = self.lines[link]
            begin = line.begins[iteration]
            line.released_s.update(zip([begin + p for p in positions], last_s, strict=True))


def _rows(times: list[Times]) -> NDArray[np.float64]:
    """[iteration, rank], or a single column if all ranks are alike."""
    rows = np.array(times, dtype=np.float64)
    return rows if rows.ndim == 2 else rows[:, None]
