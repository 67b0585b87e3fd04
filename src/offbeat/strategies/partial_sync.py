"""PartialSync: each iteration of a period averages its own set of layers, under backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from offbeat.plan import Kind, Moment, Payload, Plan, transfer
from offbeat.profile import Profile
from offbeat.solve import Sets, equal_number
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.local_sgd import EVERY_ITERATION

Average = Literal["after_update", "before_update"]


@dataclass(frozen=True)
class PartialSync(Strategy):
    """Equal-number partition (PLSGD-ENP): ceil(L / period) layers per iteration, in order.

    `average="after_update"` steps a layer in backward and averages the result;
    `"before_update"` averages the parameters in backward and applies the local step at
    `optimizer.step()`, which allows gradient clipping and GradScaler.
    """

    period: int = 5
    average: Average = "after_update"
    state: StatePolicy = "local"

    name: ClassVar[str] = "partial-sync"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Section 3.1, Example 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)

    def plan(self, profile: Profile, rank: int = 0) -> Plan:
        backward_s, communication_s = layer_times(profile, self.average, self.state)
        sets = equal_number(backward_s, communication_s, self.period)
        return partial_plan(self.name, profile, sets, ((),) * self.period, self.average, self.state)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=False)

    @property
    def state_policy(self) -> StatePolicy:
        return self.state


@dataclass(frozen=True)
class Piece:
    """What a partial synchronization moves at once: neighbouring buckets, by default one, or one
    of equal slices of them."""

    buckets: range
    part: int = 0
    parts: int = 1

    def payloads(self, state: StatePolicy) -> list[Payload]:
        """Its messages: the parameters, and an averaged state."""
        return [Payload(kind, self.buckets, self.part, self.parts) for kind in kinds_of(state)]

    def seconds(self, profile: Profile, state: StatePolicy) -> float:
        """Time of its messages on the default link."""
        link = profile.default_link.name
        return sum(profile.message_s(payload, link) for payload in self.payloads(state))


def kinds_of(state: StatePolicy) -> tuple[Kind, ...]:
    """What an average moves."""
    return ("param", "state") if state == "averaged" else ("param",)


def whole(buckets: int) -> list[Piece]:
    """Every bucket, each alone."""
    return [Piece(range(bucket, bucket + 1)) for bucket in range(buckets)]


def layer_times(
    profile: Profile, average: Average, state: StatePolicy
) -> tuple[list[float], list[float]]:
    """What the layer-set solvers take: backward and communication seconds per bucket, as the
    slowest rank sees them; backward contains the update when that happens in backward."""
    slowest = profile.slowest()
    backward_s = [bucket.backward_s for bucket in slowest.buckets]
    if average == "after_update":
        backward_s = [b + u for b, u in zip(backward_s, slowest.bucket_update_s, strict=True)]
    communication_s = [piece.seconds(profile, state) for piece in whole(len(backward_s))]
    return backward_s, communication_s


def partial_plan(
    name: str,
    profile: Profile,
    sets: Sets,
    fill: Sets,
    average: Average,
    state: StatePolicy,
    pieces: Sequence[Piece] = (),
) -> Plan:
    """Plan that averages piece i in the iterations h with i in sets[h] or fill[h].

    `pieces` says what the sets' indices stand for, by default the buckets.
    """
    size = len(profile.buckets)
    pieces = pieces or whole(size)
    phases: list[list[int]] = [[] for _ in pieces]
    for h, members in enumerate(zip(sets, fill, strict=True)):
        for i in chain(*members):
            phases[i].append(h)
    after_update = average == "after_update"
    transfers = [
        transfer(
            kind,
            piece.buckets,
            after=Moment("updated" if after_update else "grad", piece.buckets[-1]),
            before=Moment("end" if after_update else "step"),
            phases=phases[i],
            link=profile.default_link.name,
            part=piece.part,
            parts=piece.parts,
        )
        for i, piece in enumerate(pieces)
        for kind in kinds_of(state)
    ]
    return Plan(
        name,
        size,
        tuple(transfers),
        period=len(sets),
        updates="in_backward" if after_update else "at_step",
        notes={"sets": _buckets(sets, pieces), "fill": _buckets(fill, pieces)},
    )


def _buckets(sets: Sets, pieces: Sequence[Piece]) -> list[list[int]]:
    return [sorted({b for i in members for b in pieces[i].buckets}) for members in sets]
