"""PartialSync: one set of layers averaged per iteration of a period, under backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Literal

from offbeat.core.plan import Apply, Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.bsp import averages
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import Equations, layer_sets, partial
from offbeat.strategies.local_sgd import EVERY_ITERATION, kinds_of
from offbeat.strategies.outer_optimizer import OuterSGD, equations_of, outer_of, with_outer
from offbeat.strategies.solvers import Sets, equal_number

Average = Literal["after_update", "before_update"]
"""Time of a layer's average relative to its update."""
AverageSetting = Literal["auto", "after_update", "before_update"]
"""`Average`, or "auto" for `after_update` wherever backward may run updates."""


def average_of(setting: AverageSetting) -> Average:
    """Return the time of a layer's average that a setting selects."""
    return "after_update" if setting == "auto" else setting


@dataclass(frozen=True)
class PartialSync(Wired):
    """Average ceil(L / period) of the L layers per iteration, in order (PLSGD-ENP).

    `average="before_update"` averages the parameters in backward and applies the local update in
    `optimizer.step()`, which allows gradient clipping and GradScaler.
    """

    period: int = 5
    """Every layer is averaged once in `period` iterations."""
    average: AverageSetting = "auto"
    """Time of a layer's average: after its own update in backward, or before the update, which then
    takes place in `optimizer.step()`; `auto`: `after_update`, but `before_update` if the model is
    sharded."""
    state: StatePolicy = "local"
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`),
    or clear it (`reset`)."""
    outer: OuterSGD | None = None
    """Optimizer that applies the change of every average as a step, such as OuterSGD(0.8, 0.3) or
    `0.8/0.3`; it needs two more copies of the parameters. None: parameters become the average."""

    name: ClassVar[str] = "partial-sync"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "dreamddp with its period is as fast or faster"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Section 3.1, Example 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        object.__setattr__(self, "outer", outer_of(self.outer))

    def schedule(self, profile: Profile) -> Plan:
        average = average_of(self.average)
        backward_s, communication_s = layer_times(profile, average, self.state)
        sets = equal_number(backward_s, communication_s, self.period)
        none: Sets = ((),) * self.period
        plan = partial_plan(self.name, profile, sets, none, average, self.state)
        return plan if self.outer is None else with_outer(plan, self.outer, profile)

    def at_step(self) -> Strategy | None:
        early = average_of(self.average) == "after_update"
        return replace(self, average="before_update") if early else None

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update"

    def equations(self, plan: Plan) -> Equations:
        outer = equations_of(self.outer)
        return partial(layer_sets(plan), average_of(self.average), self.state, outer=outer)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=False)


@dataclass(frozen=True)
class Piece:
    """Unit that a partial synchronization averages: a run of buckets, or a slice of it.

    Attributes:
        buckets: neighbouring buckets, by default one.
        part: index of the slice.
        parts: number of equal slices of the run.
    """

    buckets: range
    part: int = 0
    parts: int = 1

    def payloads(self, state: StatePolicy) -> list[Payload]:
        """Return the payloads of its messages: parameters, and optimizer state if that is
        averaged."""
        return [Payload(kind, self.buckets, self.part, self.parts) for kind in kinds_of(state)]

    def averages(self, profile: Profile, state: StatePolicy, **fields: Any) -> list[Transfer]:
        """Return the transfers of its messages, released by its last gradient. `fields` are those
        of `transfer`."""
        after, part, parts = Moment("grad", self.buckets[-1]), self.part, self.parts
        return averages(
            profile, kinds_of(state), self.buckets, after=after, part=part, parts=parts, **fields
        )

    def seconds(self, profile: Profile, state: StatePolicy) -> float:
        """Return the seconds of its messages on the default link."""
        link = profile.default_link.name
        return sum(profile.message_s(payload, link) for payload in self.payloads(state))


def whole_buckets(buckets: int) -> list[Piece]:
    """Return one piece per bucket."""
    return [Piece(range(bucket, bucket + 1)) for bucket in range(buckets)]


def layer_times(
    profile: Profile, average: Average, state: StatePolicy
) -> tuple[list[float], list[float]]:
    """Return the inputs of the layer-set solvers: backward and communication seconds per bucket.

    Times are those of the slowest rank. Backward includes the update if that takes place in
    backward.
    """
    slowest = profile.slowest()
    backward_s = [bucket.backward_s for bucket in slowest.buckets]
    if average == "after_update":
        backward_s = [b + s for b, s in zip(backward_s, slowest.bucket_step_s, strict=True)]
    return backward_s, piece_times(profile, state)


def piece_times(profile: Profile, state: StatePolicy, parts: int = 1) -> list[float]:
    """Return the seconds of each bucket's messages on the default link, each alone, or of one of
    `parts` equal slices."""
    link = profile.default_link.name
    kinds = [profile.bucket_message_s(link, kind, parts) for kind in kinds_of(state)]
    return [sum(seconds) for seconds in zip(*kinds, strict=True)]


def partial_plan(
    name: str,
    profile: Profile,
    sets: Sets,
    fill: Sets,
    average: Average,
    state: StatePolicy,
    pieces: Sequence[Piece] = (),
) -> Plan:
    """Return the plan that averages piece i in each iteration h with i in sets[h] or fill[h].

    Indices refer to `pieces`, by default to one piece per bucket.
    """
    size = len(profile.buckets)
    pieces = pieces or whole_buckets(size)
    active: list[tuple[int, ...]] = [()] * len(pieces)
    for h, members in enumerate(zip(sets, fill, strict=True)):
        for i in chain(*members):
            active[i] += (h,)
    shared = {members: Phases(members) for members in set(active)}
    phases = [shared[members] for members in active]
    due = Moment("end" if average == "after_update" else "step")
    transfers: list[Transfer] = []
    for i, piece in enumerate(pieces):
        transfers += piece.averages(profile, state, before=due, phases=phases[i])
    applies = []
    if state == "reset":
        applies += [
            Apply("reset", piece.buckets, due, phases[i])
            for i, piece in enumerate(pieces)
            if phases[i]
        ]
    at = Moment("grad" if average == "after_update" else "step")
    applies.append(local(size, at, range(len(sets))))
    return Plan(
        name,
        size,
        tuple(transfers),
        tuple(applies),
        period=len(sets),
        facts=layer_set_facts(sets, fill, pieces),
    )


def layer_set_facts(sets: Sets, fill: Sets, pieces: Sequence[Piece]) -> tuple[Fact, ...]:
    """Return facts about the sets: buckets by iteration."""
    return (
        Fact("sets", _buckets(sets, pieces), "buckets averaged in each iteration"),
        Fact("fill", _buckets(fill, pieces), "further ones, where they cost no time"),
    )


def _buckets(sets: Sets, pieces: Sequence[Piece]) -> list[list[int]]:
    return [sorted({b for i in members for b in pieces[i].buckets}) for members in sets]
