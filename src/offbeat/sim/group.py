"""Groups: ranks with one plan, advanced together through its program."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from offbeat.sim.fifo import FifoLink
from offbeat.sim.program import Program, Slot, Step

# Of a group of ranks: a float if they are all alike, else an array with one value per rank.
Times = Any


class Work(NamedTuple):
    """A recorded stretch of compute or of waiting."""

    kind: str
    iteration: int
    bucket: int | None
    start_s: Times
    end_s: Times


class Release(NamedTuple):
    """A recorded release of a message; its link knows when it ran."""

    link: str
    iteration: int
    position: int
    at_s: Times


class Blocked(NamedTuple):
    """A wait for a message that cannot run yet."""

    iteration: int
    slot: Slot


@dataclass(eq=False)
class Group:
    """Ranks with one plan; `ends_s` and `waited_s` grow by one entry per iteration.

    `factors` yields the compute time relative to the profile's for one iteration after another.
    Work and releases are recorded of the iterations in `record`.
    """

    ranks: tuple[int, ...]
    program: Program
    factors: Iterator[Times]
    links: Mapping[str, FifoLink]
    record: range = range(0)
    alike: bool = True
    ends_s: list[Times] = field(default_factory=list)
    waited_s: list[Times] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)

    def live(self, iterations: int) -> Iterator[Blocked]:
        """Run so many iterations; yields whenever it is blocked, and tries again when resumed."""
        now: Times = 0.0 if self.alike else np.zeros(len(self.ranks))
        other_s = self.program.profile.other_s
        for iteration in range(iterations):
            for link in self.links.values():
                link.open(iteration)
            recorded = iteration in self.record
            if recorded:
                self.work.append(Work("other", iteration, None, now, now + other_s))
            steps = self.program.steps(iteration, detailed=recorded)
            now = yield from self._iterate(iteration, steps, now + other_s)
            self.ends_s.append(now)

    def _iterate(
        self, iteration: int, steps: tuple[Step, ...], now: Times
    ) -> Generator[Blocked, None, Times]:
        """One iteration from `now` on; returns its end. Times are never changed in place."""
        factor, links = next(self.factors), self.links
        later = max if self.alike else np.maximum
        waited = 0.0
        for seconds, due, released, work in steps:
            begun, now = now, now + seconds * factor
            if work is not None:
                self.work.append(Work(work[0], iteration, work[1], begun, now))
            if due:
                begun = now
                for slot in due:
                    link, of = links[slot.link], iteration - slot.lag
                    while (end_s := link.arrival_s(of, slot.position)) is None:
                        yield Blocked(iteration, slot)
                    now = later(now, end_s)
                waited = waited + (now - begun)
                if iteration in self.record:
                    self.work.append(Work("wait", iteration, None, begun, now))
            if released:
                self._release(iteration, released, now)
        self.waited_s.append(waited)
        return now

    def _release(self, iteration: int, released: tuple[Slot, ...], now: Times) -> None:
        last_s = now if self.alike else float(now.max())
        for name, lag, position in released:
            self.links[name].release(iteration - lag, position, last_s)
            if iteration - lag in self.record:
                self.releases.append(Release(name, iteration - lag, position, now))
