"""Program of one rank with the seconds of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, groupby, islice
from typing import NamedTuple

import numpy as np

from offbeat.core.derive import effects
from offbeat.core.derive.windows import Windows
from offbeat.core.plan import Apply, Plan, Transfer
from offbeat.core.plan.program import Program, Step, bucket_positions
from offbeat.core.plan.semantics import is_active
from offbeat.core.sim.costs import Costs, Seconds
from offbeat.core.sim.outcomes import Outcomes


class Slot(NamedTuple):
    """Reference to a message: the `position`-th on `link` of the iteration `lag` iterations ago."""

    link: str
    lag: int
    position: int


class VoteSlot(NamedTuple):
    """Reference to a vote of the iteration `lag` iterations ago."""

    name: str
    lag: int


@dataclass
class Releases:
    """Messages of one link that a leg releases.

    Attributes:
        positions: position of each message among the iteration's messages on the link.
        after_s: seconds from the start of the leg's compute to each release.
    """

    positions: list[int] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)

    @cached_property
    def column_s(self) -> Seconds:
        """Return `after_s` as an array `[message, 1]`."""
        return np.array(self.after_s)[:, None]


@dataclass
class Leg:
    """Part of an iteration: one wait, followed by compute without waiting.

    Attributes:
        due: messages to wait for.
        decided: votes to wait for.
        cast_votes: votes that the rank casts, with the seconds from the start of compute.
        released: messages that the rank releases, by link.
        seconds: seconds of compute.
    """

    due: tuple[Slot, ...] = ()
    decided: tuple[VoteSlot, ...] = ()
    cast_votes: list[tuple[str, float]] = field(default_factory=list)
    released: dict[str, Releases] = field(default_factory=lambda: defaultdict(Releases))
    seconds: float = 0.0


class TimedProgram:
    """One rank's program with the seconds of a profile. Equal iterations share their legs.

    Args:
        costs: times and bytes of the plan.
        outcomes: outcomes of votes.
        rank: rank of the program.
        repeats: number of iterations that an idle phase represents, by phase; 1 for other phases.
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
        # Votes, as (lag, name), on which the legs of an iteration depend in addition to its key.
        conditional = [r for r in plan.transfers if r.when]
        asked = {(lag + r.ago, r.when) for r in conditional for lag in (0, r.before.lag)}
        asked |= {(r.at.lag + r.ago, r.when) for r in plan.applies if r.when}
        self._conditions = sorted(asked)
        late = {(r.at.lag, r.arg("age", 0)) for r in plan.applies if effects.is_update(r)}
        self._late = sorted((lag, age) for lag, age in late if age)
        self._first = {age: _closing_iteration(plan, age) for _, age in self._late}
        self._segments: dict[int, tuple[dict[str, list[Transfer]], list[tuple[str, int]]]] = {}
        self._bytes: dict[tuple[str, int], float] = {}
        self._legs: dict[tuple[object, ...], tuple[Leg, ...]] = {}

    def repeat_count(self, iteration: int) -> int:
        """Return the number of iterations that an iteration represents."""
        return self._repeats.get(self.plan.phase(iteration), 1) if self._repeats else 1

    def queues(self, iteration: int) -> dict[str, list[Transfer]]:
        """Return the transfers of one iteration by link, in issue order."""
        return self._tables(iteration)[0]

    def _slots(self, iteration: int) -> list[tuple[str, int]]:
        """Return for every transfer of an iteration its link and its position on that link."""
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

    def is_on(self, rule: Transfer | Apply, iteration: int) -> bool:
        """Return whether a rule is executed in an iteration.

        The outcome of the rule's vote must be yes, and an update needs gradients of its age.
        """
        votes = self.outcomes
        if not is_active(rule, iteration, lambda vote, ago: votes.is_yes(vote, iteration - ago)):
            return False
        late = isinstance(rule, Apply) and effects.is_update(rule) and rule.arg("age", 0)
        return not late or iteration > self._first[late]

    def link_bytes(self, link: str, iteration: int) -> float:
        """Return the bytes of an iteration's messages on a link, without skipped messages."""
        queue = self.queues(iteration).get(link, [])
        if not self._conditions:
            key = link, self.program.segment(iteration)
            if key not in self._bytes:
                self._bytes[key] = float(sum(self.costs.message_bytes(t, self.rank) for t in queue))
            return self._bytes[key]
        sent = (self.costs.message_bytes(t, self.rank) for t in queue if self.is_on(t, iteration))
        return float(sum(sent))

    def legs(self, iteration: int) -> tuple[Leg, ...]:
        """Return the legs of one iteration, without the profile's `other_s`."""
        key: tuple[object, ...] = (self.program.key(iteration), self.repeat_count(iteration))
        if self._conditions or self._late:
            key += tuple(
                self.outcomes.is_yes(when, iteration - lag) if lag <= iteration else None
                for lag, when in self._conditions
            )
            key += tuple(iteration - lag > self._first[age] for lag, age in self._late)
        if key not in self._legs:
            self._legs[key] = tuple(self._make_legs(iteration))
        return self._legs[key]

    def slot(self, iteration: int, lag: int, index: int) -> Slot:
        """Return the slot of the `index`-th transfer of the iteration `lag` iterations ago."""
        link, position = self._slots(iteration - lag)[index]
        return Slot(link, lag, position)

    def sending_s(self, iteration: int, step: Step) -> float:
        """Return the processor seconds that the messages released in a step take from compute.

        Processor time while the rank waits for messages is part of the waiting time.
        """
        transfers = self.program.transfers(iteration)
        released = (transfers[index] for index in step.release)
        return sum(self.costs.sending_s(t, self.rank) for t in released if self.is_on(t, iteration))

    # ---- binding ----------------------------------------------------------------------------

    def _make_legs(self, iteration: int) -> Iterator[Leg]:
        steps = self.program.steps_without_bucket_applies(iteration)
        seconds = self._seconds(iteration, steps) * self.repeat_count(iteration)
        # Cut twice at each step: before its updates and after them.
        cuts = [0, *chain.from_iterable((2 * s.position + 1, 2 * s.position + 2) for s in steps)]
        pieces = np.add.reduceat(seconds, cuts).tolist()
        leg = Leg(seconds=pieces[0])
        slots = self._slots(iteration)
        for step, applied_s, later_s in zip(steps, pieces[1::2], pieces[2::2], strict=True):
            due = self._due_slots(iteration, step) if step.wait else ()
            decided = tuple(VoteSlot(vote.name, lag) for lag, vote in step.decide)
            if due or decided:
                yield leg
                leg = Leg(due, decided)
            leg.seconds += applied_s
            leg.cast_votes += [(vote.name, leg.seconds) for vote in step.ask]
            for index in step.release:
                link, position = slots[index]
                leg.released[link].positions.append(position)
                leg.released[link].after_s.append(leg.seconds)
            leg.seconds += later_s + self.sending_s(iteration, step)
        yield leg

    def _seconds(self, iteration: int, steps: Sequence[Step]) -> Seconds:
        """Return seconds, alternating for each place: compute before the moment, updates at it."""
        n = self.plan.buckets
        applied_s = np.zeros(2 * n + 2)
        for lag, apply in self.program.bucket_applies(iteration):
            seconds = self.costs.apply_s(apply)
            if seconds is not None and self.is_on(apply, iteration - lag):
                where = bucket_positions(apply, n)
                applied_s[list(where)] += seconds
        for step in steps:
            for lag, apply in step.apply:
                seconds = self.costs.apply_s(apply)
                if seconds is not None and self.is_on(apply, iteration - lag):
                    applied_s[step.position] += seconds.sum()
        both = np.zeros(2 * len(applied_s) + 1)  # ends with a zero for a cut at the end
        both[:-1:2], both[1::2] = self.costs.compute_s, applied_s
        return both

    def _due_slots(self, iteration: int, step: Step) -> tuple[Slot, ...]:
        """Return for each link the last message to wait for, because links are first in, first out.

        A rank does not wait for skipped messages.
        """
        latest: dict[str, Slot] = {}
        for lag, group in groupby(step.wait, key=lambda due: due.lag):
            slots = self._slots(iteration - lag)
            for _, index in group:
                link, position = slots[index]
                known = latest.get(link)
                later = known is None or (-lag, position) > (-known.lag, known.position)
                if later and self._is_awaited(iteration - lag, link, position):
                    latest[link] = Slot(link, lag, position)
        return tuple(latest.values())

    def _is_awaited(self, iteration: int, link: str, position: int) -> bool:
        return not self._conditions or self.is_on(self.queues(iteration)[link][position], iteration)


def _closing_iteration(plan: Plan, age: int) -> int:
    """Return the iteration that closes the `age`-th accumulation window, or -1 without windows.

    Gradients with the age `age` exist only after this iteration.
    """
    windows = Windows(plan)
    if not windows.late:
        return -1
    return next(islice(filter(windows.closes_window, count()), age - 1, None))
