"""Programs in virtual time: the steps of one rank with their seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, groupby, islice
from typing import NamedTuple

import numpy as np

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Plan, Transfer
from offbeat.core.plan.program import Program, Step, bucket_positions
from offbeat.core.sim.costs import Costs, Seconds
from offbeat.core.sim.outcomes import Outcomes


class Slot(NamedTuple):
    """A message: the `position`-th on `link` of this rank's iteration `lag` iterations ago."""

    link: str
    lag: int
    position: int


class Say(NamedTuple):
    """A vote of the iteration `lag` iterations ago."""

    name: str
    lag: int


class Releases(NamedTuple):
    """Messages of one link that a leg releases, each so many seconds after its start."""

    link: str
    positions: list[int]
    after_s: list[float]
    column_s: Seconds  # the same as a column


class Leg(NamedTuple):
    """Wait for messages and outcomes, then compute for `seconds` without waiting any more, having
    the say in some votes and releasing messages in between."""

    due: tuple[Slot, ...]
    decided: tuple[Say, ...]
    asked: tuple[tuple[str, float], ...]
    released: tuple[Releases, ...]
    seconds: float


class _Draft:
    """A leg while it is put together."""

    def __init__(self, due: tuple[Slot, ...] = (), decided: tuple[Say, ...] = ()) -> None:
        self.due, self.decided = due, decided
        self.seconds = 0.0
        self.asked: list[tuple[str, float]] = []
        self.released: dict[str, tuple[list[int], list[float]]] = {}

    def release(self, link: str, position: int) -> None:
        positions, after_s = self.released.setdefault(link, ([], []))
        positions.append(position)
        after_s.append(self.seconds)

    def done(self) -> Leg:
        released = [
            Releases(link, positions, after_s, np.array(after_s)[:, None])
            for link, (positions, after_s) in self.released.items()
        ]
        return Leg(self.due, self.decided, tuple(self.asked), tuple(released), self.seconds)


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
        conditional = [r for r in plan.transfers if r.when]
        asked = {(lag + r.ago, r.when) for r in conditional for lag in (0, r.before.lag)}
        asked |= {(r.at.lag + r.ago, r.when) for r in plan.applies if r.when}
        self._conditions = sorted(asked)
        late = {(r.at.lag, r.arg("age", 0)) for r in plan.applies if effects.is_update(r)}
        self._late = sorted((lag, age) for lag, age in late if age)
        self._first = {age: _close(plan, age) for _, age in self._late}
        self._segments: dict[int, tuple[dict[str, list[Transfer]], list[tuple[str, int]]]] = {}
        self._bytes: dict[tuple[str, int], float] = {}
        self._legs: dict[tuple[object, ...], tuple[Leg, ...]] = {}

    def repeat(self, iteration: int) -> int:
        """Iterations that one stands for."""
        return self._repeats.get(self.plan.phase(iteration), 1) if self._repeats else 1

    def queues(self, iteration: int) -> dict[str, list[Transfer]]:
        """Transfers of one iteration by link, in issue order."""
        return self._tables(iteration)[0]

    def _slots(self, iteration: int) -> list[tuple[str, int]]:
        """Link and position there of every transfer of an iteration."""
        return self._tables(iteration)[1]

    def _tables(self, iteration: int) -> tuple[dict[str, list[Transfer]], list[tuple[str, int]]]:
        segment = self.program.segment(iteration)
        if segment not in self._segments:
            queues: dict[str, list[Transfer]] = {}
            slots = []
            for t in self.program.transfers(iteration):
                queue = queues.setdefault(t.link, [])
                slots.append((t.link, len(queue)))
                queue.append(t)
            self._segments[segment] = queues, slots
        return self._segments[segment]

    def goes(self, rule: Transfer | Apply, iteration: int) -> bool:
        """Whether a rule of an iteration is carried out: the vote says yes, and the optimizer has
        gradients to apply."""
        if rule.when is not None and not self.outcomes.yes(rule.when, iteration - rule.ago):
            return False
        late = isinstance(rule, Apply) and effects.is_update(rule) and rule.arg("age", 0)
        return not late or iteration > self._first[late]

    def sent_bytes(self, link: str, iteration: int) -> float:
        """Payload of an iteration's messages on a link, without those that are passed over."""
        queue = self.queues(iteration).get(link, [])
        if not self._conditions:
            key = link, self.program.segment(iteration)
            if key not in self._bytes:
                self._bytes[key] = float(sum(self.costs.message_bytes(t, self.rank) for t in queue))
            return self._bytes[key]
        sent = (self.costs.message_bytes(t, self.rank) for t in queue if self.goes(t, iteration))
        return float(sum(sent))

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
        link, position = self._slots(iteration - lag)[index]
        return Slot(link, lag, position)

    def sending_s(self, iteration: int, step: Step) -> float:
        """What the messages that a step releases take from the compute right after it. Where the
        rank only waits for them it is part of the waiting."""
        transfers = self.program.transfers(iteration)
        released = (transfers[index] for index in step.release)
        return sum(self.costs.sending_s(t, self.rank) for t in released if self.goes(t, iteration))

    # ---- binding ----------------------------------------------------------------------------

    def _bind(self, iteration: int) -> Iterator[Leg]:
        steps = self.program.steps_without_bucket_applies(iteration)
        seconds = self._seconds(iteration, steps) * self.repeat(iteration)
        # Two cuts for each step: before it applies, and after.
        cuts = [0, *chain.from_iterable((2 * s.position + 1, 2 * s.position + 2) for s in steps)]
        pieces = np.add.reduceat(seconds, cuts).tolist()
        leg = _Draft()
        leg.seconds = pieces[0]
        slots = self._slots(iteration)
        for step, applied_s, later_s in zip(steps, pieces[1::2], pieces[2::2], strict=True):
            due = self._due(iteration, step) if step.wait else ()
            decided = tuple(Say(vote.name, lag) for lag, vote in step.decide)
            if due or decided:
                yield leg.done()
                leg = _Draft(due, decided)
            leg.seconds += applied_s
            leg.asked += [(vote.name, leg.seconds) for vote in step.ask]
            for index in step.release:
                leg.release(*slots[index])
            leg.seconds += later_s + self.sending_s(iteration, step)
        yield leg.done()

    def _seconds(self, iteration: int, steps: Sequence[Step]) -> Seconds:
        """By place, alternating: the compute before a moment, and what is applied at it."""
        n = self.plan.buckets
        applied_s = np.zeros(2 * n + 2)
        for lag, apply in self.program.bucket_applies(iteration):
            seconds = self.costs.applied_s(apply)
            if seconds is not None and self.goes(apply, iteration - lag):
                where = bucket_positions(apply, n)
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
        for lag, group in groupby(step.wait, key=lambda due: due.lag):
            slots = self._slots(iteration - lag)
            for _, index in group:
                link, position = slots[index]
                known = latest.get(link)
                later = known is None or (-lag, position) > (-known.lag, known.position)
                if later and self._awaited(iteration - lag, link, position):
                    latest[link] = Slot(link, lag, position)
        return tuple(latest.values())

    def _awaited(self, iteration: int, link: str, position: int) -> bool:
        return not self._conditions or self.goes(self.queues(iteration)[link][position], iteration)


def _close(plan: Plan, age: int) -> int:
    """The iteration that closes the `age`-th accumulation window: the optimizer has gradients of
    that age only afterwards."""
    phases = [apply.phases for apply in plan.applies if effects.is_window_end(apply)]
    if not phases:
        return -1
    once = sorted({p for runs in phases for p in runs if p < plan.prologue})
    cycle = sorted({p for runs in phases for p in runs if p >= plan.prologue})
    repeated = (p + n * plan.period for n in count() for p in cycle)
    return next(islice(chain(once, repeated), age - 1, None))
