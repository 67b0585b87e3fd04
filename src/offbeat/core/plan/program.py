"""Program of one rank: the steps of each iteration of a plan, in order.

A worker passes the moments of an iteration in the order forward(L-1) .. forward(0), grad(0) ..
grad(L-1), step, end. At each moment it executes, in this order: waits, decisions of votes, applies,
ballots of votes, releases. The compute of forward(b) follows the moment, the compute of grad(b)
precedes it. `check`, the simulator, the runtime and the interpreter of plans all execute programs,
so this module alone defines the meaning of a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import Apply, Moment, Plan, Transfer, Vote


def position(moment: Moment, buckets: int) -> int:
    """Return the position of a moment among the moments of its iteration, from 0.

    A moment without a bucket is the first forward or the last gradient of the model.
    """
    if moment.point == "step":
        return 2 * buckets
    if moment.point == "end":
        return 2 * buckets + 1
    if moment.point == "forward":
        return buckets - 1 - (buckets - 1 if moment.bucket is None else moment.bucket)
    return buckets + (buckets - 1 if moment.bucket is None else moment.bucket)


class Due(NamedTuple):
    """Message to wait for: transfer `number` of this rank in the iteration `lag` iterations
    earlier."""

    lag: int
    number: int


class Step(NamedTuple):
    """Actions of a rank at one moment, in the order of the fields.

    Attributes:
        position: position of the moment in its iteration.
        wait: messages to wait for.
        decide: votes whose outcome is due, each with its lag.
        apply: applies to execute, each with its lag.
        ask: votes in which the rank casts its ballot.
        release: indices of the transfers of this iteration to release.

    A lag is the number of iterations since the iteration that a vote or an apply belongs to.
    """

    position: int
    wait: tuple[Due, ...] = ()
    decide: tuple[tuple[int, Vote], ...] = ()
    apply: tuple[tuple[int, Apply], ...] = ()
    ask: tuple[Vote, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Rules:
    """Rules of one rank that are active in one iteration.

    `places` holds, for each transfer, the position of its release, the position of its wait (None
    if this rank does not send or receive), and the lag of its wait.
    """

    transfers: tuple[Transfer, ...]
    applies: tuple[Apply, ...]
    votes: tuple[Vote, ...]
    places: tuple[tuple[int | None, int | None, int], ...]

    @cached_property
    def awaited_transfers(self) -> frozenset[int]:
        """Return the indices of the transfers that this rank waits for."""
        return frozenset(i for i, (_, due, _) in enumerate(self.places) if due is not None)


class Program:
    """Steps of one rank for each iteration of a plan. Moments without an action have no step.

    Iterations with equal rules share their tables, so a long period needs no more memory.

    Attributes:
        edges: first phase of each run of phases with equal rules, ascending.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan = plan
        self.rank = rank
        self.step, self.end = 2 * plan.buckets, 2 * plan.buckets + 1  # positions
        rules = (*plan.transfers, *plan.applies, *plan.votes)
        # All phases between two adjacent edges have the same rules.
        edges = {edge for rule in rules for run in rule.phases.runs for edge in run}
        self.edges = sorted({0, plan.prologue, *edges})
        self._rules = self._rules_by_segment()
        self.lags = sorted({0, *(lag for rule in rules for lag in _lags(rule))})
        self.lag = self.lags[-1]
        self._steps: dict[tuple[int, ...], tuple[Step, ...]] = {}
        self._sparse: dict[tuple[int, ...], tuple[Step, ...]] = {}
        self._narrow: dict[int, list[Apply]] = {}
        self._keys: dict[int, tuple[int, ...]] = {}  # by phase

    def segment(self, iteration: int) -> int:
        """Return the number of the segment of an iteration. All iterations of a segment have the
        same rules."""
        return bisect_right(self.edges, self.plan.phase(iteration)) - 1

    def transfers(self, iteration: int) -> tuple[Transfer, ...]:
        """Return the transfers of an iteration in which this rank takes part, in issue order."""
        return self._rules[self.segment(iteration)].transfers

    def awaited_transfers(self, iteration: int) -> frozenset[int]:
        """Return the indices of the transfers of an iteration that this rank receives."""
        return self._rules[self.segment(iteration)].awaited_transfers

    def key(self, iteration: int) -> tuple[int, ...]:
        """Return the key of an iteration. Iterations with equal keys have the same steps."""
        if iteration < self.plan.prologue + self.lag:  # an earlier iteration may be of the prologue
            return self._make_key(iteration)
        phase = self.plan.phase(iteration)
        if phase not in self._keys:
            self._keys[phase] = self._make_key(iteration)
        return self._keys[phase]

    def _make_key(self, iteration: int) -> tuple[int, ...]:
        return tuple(self.segment(iteration - lag) if lag <= iteration else -1 for lag in self.lags)

    def steps(self, iteration: int) -> tuple[Step, ...]:
        """Return the steps of an iteration, in the order of their positions."""
        key = self.key(iteration)
        if key not in self._steps:
            self._steps[key] = tuple(self._make_steps(key))
        return self._steps[key]

    def steps_without_bucket_applies(self, iteration: int) -> tuple[Step, ...]:
        """Return the steps of an iteration without its `bucket_applies`.

        There are far fewer of these steps, which is enough for the times of messages.
        """
        key = self.key(iteration)
        if key not in self._sparse:
            self._sparse[key] = tuple(self._make_steps(key, narrow=False))
        return self._sparse[key]

    def bucket_applies(self, iteration: int) -> list[tuple[int, Apply]]:
        """Return the applies that each bucket executes at its own moment, with their lags.

        `bucket_positions` returns the positions of these moments.
        """
        applies = self._applies(self.key(iteration))
        return [(lag, apply) for lag, apply in applies if has_moment_per_bucket(apply)]

    @property
    def bounds(self) -> list[int]:
        """Return the phases at which the rules change, and the number of phases."""
        stop = len(self.plan.phases)
        return [edge for edge in self.edges if edge < stop] + [stop]

    # ---- tables -----------------------------------------------------------------------------

    def _rules_by_segment(self) -> list[_Rules]:
        tables: list[tuple[list[Any], ...]] = [([], [], [], []) for _ in self.edges]
        plan = self.plan
        for column, rules in enumerate((plan.transfers, plan.applies, plan.votes)):
            for rule in rules:
                if not self._involves_rank(rule):
                    continue
                positions = self._transfer_positions(rule) if isinstance(rule, Transfer) else None
                for start, stop in rule.phases.runs:
                    first = bisect_right(self.edges, start) - 1
                    last = bisect_right(self.edges, stop - 1)
                    for segment in range(first, last):
                        tables[segment][column].append(rule)
                        if positions is not None:
                            tables[segment][3].append(positions)
        return [_Rules(*map(tuple, rules)) for rules in tables]

    def _transfer_positions(self, t: Transfer) -> tuple[int | None, int | None, int]:
        """Return the positions of the release and the wait of a transfer, and the lag of the
        wait."""
        sends = not t.only_receives(self.rank)
        receives = t.way is None or t.way[1] == self.rank
        return (
            self._position(t.after) if sends else None,
            self._position(t.before) if receives else None,
            t.before.lag,
        )

    def _involves_rank(self, rule: Transfer | Apply | Vote) -> bool:
        return isinstance(rule, Vote) or rule.ranks is None or self.rank in rule.ranks

    def _make_steps(self, key: tuple[int, ...], *, narrow: bool = True) -> Iterator[Step]:  # noqa: C901
        """Yield the steps of the iterations with a key; `key[n]` is the segment `lags[n]`
        iterations earlier.

        With `narrow`, an apply with a moment per bucket is split into one apply per bucket.
        Otherwise it is left out.
        """
        # By position, in the order of the fields of `Step`.
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
                    decide[self._position(vote.due)].append((lag, vote))
                if lag == 0:
                    ask[self._position(vote.at)].append(vote)
        for lag, rule in self._applies(key):
            if narrow or not has_moment_per_bucket(rule):
                for part in self._split_by_bucket(rule):
                    apply[self._position(part.at)].append((lag, part))
        for place in sorted(set().union(*tables)):
            yield Step(place, *[tuple(table[place]) if place in table else () for table in tables])

    def _position(self, moment: Moment) -> int:
        return position(moment, self.plan.buckets)

    def _applies(self, key: tuple[int, ...]) -> Iterator[tuple[int, Apply]]:
        """Yield the applies that an iteration executes, with their lags."""
        for lag, segment in zip(self.lags, key, strict=True):
            for apply in self._rules[segment].applies if segment >= 0 else ():
                if apply.at.lag == lag:
                    yield lag, apply

    def _split_by_bucket(self, apply: Apply) -> list[Apply]:
        """Return an apply as applies at single moments: one per bucket if each bucket has its
        own moment."""
        if not has_moment_per_bucket(apply):
            return [apply]
        if id(apply) not in self._narrow:
            point, lag = apply.at.point, apply.at.lag
            self._narrow[id(apply)] = [
                replace(apply, buckets=range(b, b + 1), at=Moment(point, b, lag))
                for b in apply.buckets
            ]
        return self._narrow[id(apply)]


def move_bounds(plan: Plan, starts: Mapping[int, int]) -> Plan:
    """Return the plan with each of `Program.bounds` moved to its phase in `starts`."""

    def move_rule(rule: Any) -> Any:
        runs = ((starts[a], starts[z]) for a, z in rule.phases.runs)
        return replace(rule, phases=Phases.of_runs(runs))

    prologue = starts[plan.prologue]
    return replace(
        plan,
        transfers=tuple(map(move_rule, plan.transfers)),
        applies=tuple(map(move_rule, plan.applies)),
        votes=tuple(map(move_rule, plan.votes)),
        prologue=prologue,
        period=starts[len(plan.phases)] - prologue,
    )


def has_moment_per_bucket(apply: Apply) -> bool:
    """Return whether each bucket of the apply has its own moment."""
    return apply.at.bucket is None and apply.at.point in ("forward", "grad")


def bucket_positions(apply: Apply, buckets: int) -> range:
    """Return the position of each bucket of an apply with a moment per bucket, in bucket order."""
    first, last = (
        position(Moment(apply.at.point, bucket), buckets)
        for bucket in (apply.buckets[0], apply.buckets[-1])
    )
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)


def work_before(place: int, buckets: int) -> tuple[tuple[str, int], ...]:
    """Return the compute between the previous position and this one, as (kind, bucket).

    The kind is "forward" or "backward". A forward follows its moment; a backward precedes its
    moment.
    """
    forward = (("forward", buckets - place),) if 0 < place <= buckets else ()
    backward = (("backward", place - buckets),) if buckets <= place < 2 * buckets else ()
    return forward + backward


def _lags(rule: Transfer | Apply | Vote) -> tuple[int, ...]:
    if isinstance(rule, Transfer):
        return (rule.before.lag,)
    return (rule.at.lag,) if isinstance(rule, Apply) else (rule.due.lag,)
