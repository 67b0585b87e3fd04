"""Programs in virtual time: the steps of one rank with their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np

from offbeat.plan import Apply, Plan, Transfer
from offbeat.plan.program import Program, Step, places
from offbeat.sim.costs import Costs, Seconds
from offbeat.sim.outcomes import Outcomes


class Slot(NamedTuple):
    """A message: the `position`-th on `link` of this rank's iteration `lag` iterations ago."""

    link: str
    lag: int
    position: int


class Say(NamedTuple):
    """A vote of the iteration `lag` iterations ago."""

    name: str
    lag: int


class Point(NamedTuple):
    """A moment at which something leaves, `after_s` seconds of compute after the leg's start."""

    after_s: float
    asked: tuple[str, ...]
    released: tuple[Slot, ...]


class Leg(NamedTuple):
    """Wait for messages and outcomes, then compute for `seconds` without waiting any more."""

    due: tuple[Slot, ...]
    decided: tuple[Say, ...]
    points: tuple[Point, ...]
    seconds: float
    after_s: Seconds  # of all points, as a column


class TimedProgram:
    """One rank's program with the seconds of a profile. Equal iterations share their legs.

    `repeats[phase]` says of a phase in which nothing moves how many iterations it stands for.
    """

    def __init__(
        self,
        costs: Costs,
        outcomes: Outcomes,
        rank: int = 0,
        repeats: Mapping[int, int] | None = None,
    ) -> None:
        self.costs, self.outcomes, self.rank = costs, outcomes, rank
        self.plan = plan = costs.plan
        self.program = Program(plan, rank)
        self.lag = self.program.lag
        self._repeats = repeats or {}
        # What a later moment of a rule depends on beside the kinds of iterations.
        self._conditions = sorted({(r.before.lag, r.when) for r in plan.transfers if r.when})
        self._conditions += sorted({(r.at.lag, r.when) for r in plan.applies if r.when})
        late = {(r.at.lag, r.arg("age", 0)) for r in plan.applies if r.rule == "local"}
        self._late = sorted((lag, age) for lag, age in late if age)
        self._first = {age: _close(plan, age) for _, age in self._late}
        self._queues: dict[int, dict[str, list[Transfer]]] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}
        self._legs: dict[tuple[object, ...], tuple[Leg, ...]] = {}

    def repeat(self, iteration: int) -> int:
        """Iterations that one stands for."""
        return self._repeats.get(self.plan.phase(iteration), 1) if self._repeats else 1

    def queues(self, iteration: int) -> dict[str, list[Transfer]]:
        """Transfers of one iteration by link, in issue order."""
        segment = self.program.segment(iteration)
        if segment not in self._queues:
            queues = self._queues[segment] = {link: [] for link in self.plan.links}
            slots = self._places[segment] = []
            for t in self.program.transfers(iteration):
                slots.append((t.link, len(queues[t.link])))
                queues[t.link].append(t)
        return self._queues[segment]

    def goes(self, rule: Transfer | Apply, iteration: int) -> bool:
        """Whether a rule of an iteration is carried out: the vote says yes, and the optimizer has
        gradients to apply."""
        if rule.when is not None and not self.outcomes.yes(rule.when, iteration):
            return False
        late = isinstance(rule, Apply) and rule.rule == "local" and rule.arg("age", 0)
        return not late or iteration > self._first[late]

    def legs(self, iteration: int) -> tuple[Leg, ...]:
        """One iteration without what comes before its first moment."""
        key: tuple[object, ...] = (self.program.key(iteration), self.repeat(iteration))
        if self._conditions or self._late:
            key += tuple(
                self.outcomes.yes(when, iteration - lag) if lag <= iteration else None
                for lag, when in self._conditions
            )
            key += tuple(iteration - lag > self._first[age] for lag, age in self._late)
        if key not in self._legs:
            self._legs[key] = tuple(self._bind(iteration))
        return self._legs[key]

    def slot(self, iteration: int, lag: int, index: int) -> Slot:
        """Where the `index`-th transfer of the iteration `lag` iterations before is."""
        self.queues(iteration - lag)
        link, position = self._places[self.program.segment(iteration - lag)][index]
        return Slot(link, lag, position)

    # ---- binding ----------------------------------------------------------------------------

    def _bind(self, iteration: int) -> Iterator[Leg]:
        steps = self.program.steps_without_spread(iteration)
        seconds = self._seconds(iteration, steps) * self.repeat(iteration)
        # Two cuts for each step: before it applies, and after.
        cuts = [0, *chain.from_iterable((2 * s.position + 1, 2 * s.position + 2) for s in steps)]
        pieces = np.add.reduceat(seconds, cuts).tolist()
        due: tuple[Slot, ...] = ()
        decided: tuple[Say, ...] = ()
        points: list[Point] = []
        now_s = pieces[0]
        for step, applied_s, later_s in zip(steps, pieces[1::2], pieces[2::2], strict=True):
            awaited = self._due(iteration, step)
            votes = tuple(Say(vote.name, lag) for lag, vote in step.decide)
            if awaited or votes:
                yield _leg(due, decided, points, now_s)
                due, decided, points, now_s = awaited, votes, [], 0.0
            now_s += applied_s
            if step.ask or step.release:
                asked = tuple(vote.name for vote in step.ask)
                released = tuple(self.slot(iteration, 0, index) for index in step.release)
                points.append(Point(now_s, asked, released))
            now_s += later_s
        yield _leg(due, decided, points, now_s)

    def _seconds(self, iteration: int, steps: Sequence[Step]) -> Seconds:
        """By place, alternating: the compute before a moment, and what is applied at it."""
        n = self.plan.buckets
        applied_s = np.zeros(2 * n + 2)
        for lag, apply in self.program.spread_applies(iteration):
            seconds = self.costs.applied_s(apply)
            if seconds is not None and self.goes(apply, iteration - lag):
                where = places(apply, n)
                applied_s[list(where)] += seconds
        for step in steps:
            for lag, apply in step.apply:
                seconds = self.costs.applied_s(apply)
                if seconds is not None and self.goes(apply, iteration - lag):
                    applied_s[step.position] += seconds.sum()
        both = np.zeros(2 * len(applied_s) + 1)  # a last zero, where the last cut may fall
        both[:-1:2], both[1::2] = self.costs.compute_s, applied_s
        return both

    def _due(self, iteration: int, step: Step) -> tuple[Slot, ...]:
        """Per link the message that arrives last: links are first in, first out. What is passed
        over is not waited for."""
        latest: dict[str, Slot] = {}
        for lag, index in step.wait:
            slot = self.slot(iteration, lag, index)
            t = self.queues(iteration - lag)[slot.link][slot.position]
            if self.goes(t, iteration - lag):
                known = latest.get(slot.link, slot)
                latest[slot.link] = max(slot, known, key=lambda s: (-s.lag, s.position))
        return tuple(latest.values())


def _leg(
    due: tuple[Slot, ...], decided: tuple[Say, ...], points: Iterable[Point], seconds: float
) -> Leg:
    column = np.array([point.after_s for point in points])[:, None]
    return Leg(due, decided, tuple(points), seconds, column)


def _close(plan: Plan, age: int) -> int:
    """The iteration that closes the `age`-th accumulation window: the optimizer has gradients of
    that age only afterwards."""
    phases = [apply.phases for apply in plan.applies if apply.rule == "close"]
    if not phases:
        return -1
    once = sorted({p for runs in phases for p in runs if p < plan.prologue})
    cycle = sorted({p for runs in phases for p in runs if p >= plan.prologue})
    repeated = (p + n * plan.period for n in count() for p in cycle)
    return next(islice(chain(once, repeated), age - 1, None))


