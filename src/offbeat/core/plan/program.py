"""Programs: what one rank does in one iteration, in order. The only place that knows it.

A worker passes the moments of an iteration in one order: forward(L-1) .. forward(0), grad(0) ..
grad(L-1), step, end. At each it waits for what is due, takes note of votes, applies, has its say
in votes, and releases - always in this sequence. The compute of forward(b) follows the moment,
that of grad(b) precedes it. `check`, the simulator, the runtime and the numeric interpreter walk
programs and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from offbeat.core.plan.types import Apply, Moment, Plan, Transfer, Vote


def position(moment: Moment, buckets: int) -> int:
    """Place of a moment among those of its iteration, from 0."""
    if moment.point == "step":
        return 2 * buckets
    if moment.point == "end":
        return 2 * buckets + 1
    if moment.point == "forward":  # of the whole model: its first, the last bucket's
        return buckets - 1 - (buckets - 1 if moment.bucket is None else moment.bucket)
    return buckets + (buckets - 1 if moment.bucket is None else moment.bucket)


def moment_at(place: int, buckets: int) -> Moment:
    """Inverse of `position`."""
    if place >= 2 * buckets:
        return Moment("step" if place == 2 * buckets else "end")
    if place >= buckets:
        return Moment("grad", place - buckets)
    return Moment("forward", buckets - 1 - place)


class Due(NamedTuple):
    """A message: the `number`-th transfer of this rank's iteration `lag` iterations ago."""

    lag: int
    number: int


class Step(NamedTuple):
    """What a rank does at one moment, in the order of the fields.

    Applies and votes come with their lag: the iteration that they belong to is so many before
    this one. `release` holds indices of this iteration's transfers.
    """

    position: int
    wait: tuple[Due, ...] = ()
    decide: tuple[tuple[int, Vote], ...] = ()
    apply: tuple[tuple[int, Apply], ...] = ()
    ask: tuple[Vote, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Rules:
    """The rules that are active in one iteration, those of this rank; of the transfers also where
    this rank releases them, where it waits for them (None: it does not), and how much later."""

    transfers: tuple[Transfer, ...]
    applies: tuple[Apply, ...]
    votes: tuple[Vote, ...]
    places: tuple[tuple[int | None, int | None, int], ...]

    @cached_property
    def awaited_transfers(self) -> frozenset[int]:
        """Indices of transfers that this rank waits for."""
        return frozenset(i for i, (_, due, _) in enumerate(self.places) if due is not None)


class Program:
    """A plan as the steps of one rank; equal iterations share their tables.

    Moments without anything to do have no step.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan = plan
        self.rank = rank
        rules = (*plan.transfers, *plan.applies, *plan.votes)
        # Between two neighbouring edges all phases are alike, so long periods cost nothing.
        edges = {edge for rule in rules for run in rule.phases.runs for edge in run}
        self._edges = sorted({0, plan.prologue, *edges})
        self._rules = self._by_segment()
        self.lags = sorted({0, *(lag for rule in rules for lag in _lags(rule))})
        self.lag = self.lags[-1]
        self._steps: dict[tuple[int, ...], tuple[Step, ...]] = {}
        self._sparse: dict[tuple[int, ...], tuple[Step, ...]] = {}
        self._narrow: dict[int, list[Apply]] = {}

    def segment(self, iteration: int) -> int:
        """Number of the iteration's kind: iterations of one kind have the same rules."""
        return bisect_right(self._edges, self.plan.phase(iteration)) - 1

    def transfers(self, iteration: int) -> tuple[Transfer, ...]:
        """Transfers of one iteration that this rank takes part in, in issue order."""
        return self._rules[self.segment(iteration)].transfers

    def awaited_transfers(self, iteration: int) -> frozenset[int]:
        """Indices of those transfers that bring this rank something."""
        return self._rules[self.segment(iteration)].awaited_transfers

    def key(self, iteration: int) -> tuple[int, ...]:
        """Equal for iterations that have the same steps."""
        return tuple(self.segment(iteration - lag) if lag <= iteration else -1 for lag in self.lags)

    def steps(self, iteration: int) -> tuple[Step, ...]:
        """Steps of one iteration, by position."""
        key = self.key(iteration)
        if key not in self._steps:
            self._steps[key] = tuple(self._bind(key))
        return self._steps[key]

    def steps_without_bucket_applies(self, iteration: int) -> tuple[Step, ...]:
        """The same without what each bucket applies at a moment of its own (`spread_applies`):
        as few steps as there are moments of messages, for who only needs to know when."""
        key = self.key(iteration)
        if key not in self._sparse:
            self._sparse[key] = tuple(self._bind(key, narrow=False))
        return self._sparse[key]

    def bucket_applies(self, iteration: int) -> list[tuple[int, Apply]]:
        """What each bucket applies at a moment of its own (see `places`), with its lag."""
        applies = self._applies(self.key(iteration))
        return [(lag, apply) for lag, apply in applies if has_moment_per_bucket(apply)]

    def shape(self) -> tuple[int, list[int]]:
        """Iterations after which nothing new happens: (prologue, one per kind in the cycle)."""
        return self.plan.prologue, self._edges

    # ---- tables -----------------------------------------------------------------------------

    def _by_segment(self) -> list[_Rules]:
        found: list[tuple[list[Any], ...]] = [([], [], [], []) for _ in self._edges]
        plan = self.plan
        for column, rules in enumerate((plan.transfers, plan.applies, plan.votes)):
            for rule in rules:
                if not self._mine(rule):
                    continue
                where = self._places(rule) if isinstance(rule, Transfer) else None
                for start, stop in rule.phases.runs:
                    first = bisect_right(self._edges, start) - 1
                    last = bisect_right(self._edges, stop - 1)
                    for segment in range(first, last):
                        found[segment][column].append(rule)
                        if where is not None:
                            found[segment][3].append(where)
        return [_Rules(*map(tuple, rules)) for rules in found]

    def _places(self, t: Transfer) -> tuple[int | None, int | None, int]:
        sends = t.ranks is None or t.ranks[0] == self.rank
        receives = t.ranks is None or t.ranks[1] == self.rank
        return (
            self._place(t.after) if sends else None,
            self._place(t.before) if receives else None,
            t.before.lag,
        )

    def _mine(self, rule: Transfer | Apply | Vote) -> bool:
        return isinstance(rule, Vote) or rule.ranks is None or self.rank in rule.ranks

    def _bind(self, key: tuple[int, ...], *, narrow: bool = True) -> Iterator[Step]:
        """Steps of an iteration; `key[n]` is the kind of the iteration `lags[n]` before. With
        `narrow` an apply that is spread becomes one for each bucket, else it is left out."""
        # By place, in the order in which a step does them.
        wait, decide, apply, ask, release = tables = [defaultdict(list) for _ in range(5)]
        for lag, segment in zip(self.lags, key, strict=True):
            if segment < 0:
                continue
            rules = self._rules[segment]
            for index, (released_at, due_at, late) in enumerate(rules.places):
                if late == lag and due_at is not None:
                    wait[due_at].append(Due(lag, index))
                if lag == 0 and released_at is not None:
                    release[released_at].append(index)
            for vote in rules.votes:
                if vote.due.lag == lag:
                    decide[self._place(vote.due)].append((lag, vote))
                if lag == 0:
                    ask[self._place(vote.at)].append(vote)
        for lag, rule in self._applies(key):
            if narrow or not has_moment_per_bucket(rule):
                for one in self._narrowed(rule):
                    apply[self._place(one.at)].append((lag, one))
        for place in sorted(set().union(*tables)):
            yield Step(place, *[tuple(table[place]) if place in table else () for table in tables])

    def _place(self, moment: Moment) -> int:
        return position(moment, self.plan.buckets)

    def _applies(self, key: tuple[int, ...]) -> Iterator[tuple[int, Apply]]:
        """What an iteration applies, with its lag."""
        for lag, segment in zip(self.lags, key, strict=True):
            for apply in self._rules[segment].applies if segment >= 0 else ():
                if apply.at.lag == lag:
                    yield lag, apply

    def _narrowed(self, apply: Apply) -> list[Apply]:
        """An apply at moments: as it is, or one for each bucket at that bucket's own."""
        if not has_moment_per_bucket(apply):
            return [apply]
        if id(apply) not in self._narrow:
            point, lag = apply.at.point, apply.at.lag
            self._narrow[id(apply)] = [
                replace(apply, buckets=range(b, b + 1), at=Moment(point, b, lag))
                for b in apply.buckets
            ]
        return self._narrow[id(apply)]


def has_moment_per_bucket(apply: Apply) -> bool:
    """Whether each bucket has a moment of its own."""
    return apply.at.bucket is None and apply.at.point in ("forward", "grad")


def bucket_positions(apply: Apply, buckets: int) -> range:
    """Positions of the buckets of an apply that is spread, in the order of its buckets."""
    first, last = (
        position(Moment(apply.at.point, bucket), buckets)
        for bucket in (apply.buckets[0], apply.buckets[-1])
    )
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)


def work_before(place: int, buckets: int) -> tuple[tuple[str, int], ...]:
    """The compute between the moment before and this one, as (forward or backward, bucket): that
    of a forward follows its moment, that of a gradient precedes its own."""
    forward = (("forward", buckets - place),) if 0 < place <= buckets else ()
    backward = (("backward", place - buckets),) if buckets <= place < 2 * buckets else ()
    return forward + backward


def _lags(rule: Transfer | Apply | Vote) -> tuple[int, ...]:
    if isinstance(rule, Transfer):
        return (rule.before.lag,)
    return (rule.at.lag,) if isinstance(rule, Apply) else (rule.due.lag,)
