"""PartialSync: each iteration of a period averages its own set of layers, under backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.plan import Apply, Fact, Kind, Moment, Phases, Plan, local, transfer
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

    def schedule(self, profile: Profile) -> Plan:
        backward_s, communication_s = layer_times(profile, self.average, self.state)
        sets = equal_number(backward_s, communication_s, self.period)
        return partial_plan(self.name, profile, sets, ((),) * self.period, self.average, self.state)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=False)


@dataclass(frozen=True)
class Piece:
    """What a partial synchronization moves at once: a bucket, or one of equal slices of it."""

    bucket: int
    part: int = 0
    parts: int = 1


def layer_times(
    profile: Profile, average: Average, state: StatePolicy
) -> tuple[list[float], list[float]]:
    """What the layer-set solvers take: backward and communication seconds per bucket, as the
    slowest rank sees them; backward contains the update when that happens in backward."""
    slowest = profile.slowest()
    backward_s = [bucket.backward_s for bucket in slowest.buckets]
    if average == "after_update":
        backward_s = [b + u for b, u in zip(backward_s, slowest.bucket_update_s, strict=True)]
    link = profile.default_link.name
    communication_s = list(profile.communication_s(link, "param"))
    if state == "averaged":
        more = profile.communication_s(link, "state")
        communication_s = [c + m for c, m in zip(communication_s, more, strict=True)]
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
    pieces = pieces or [Piece(bucket) for bucket in range(size)]
    kinds: tuple[Kind, ...] = ("param", "state") if state == "averaged" else ("param",)
    phases = [Phases(h for h in range(len(sets)) if i in sets[h] or i in fill[h]) for i in range(len(pieces))]
    due = Moment("end" if average == "after_update" else "step")
    transfers = [
        transfer(
            kind,
            range(piece.bucket, piece.bucket + 1),
            after=Moment("grad", piece.bucket),
            before=due,
            phases=phases[i],
            link=profile.default_link.name,
            part=piece.part,
            parts=piece.parts,
        )
        for i, piece in enumerate(pieces)
        for kind in kinds
    ]
    applies = []
    if state == "reset":
        applies += [
            Apply("reset", range(piece.bucket, piece.bucket + 1), due, phases[i])
            for i, piece in enumerate(pieces)
        ]
    at = Moment("grad" if average == "after_update" else "step")
    applies.append(local(size, at, range(len(sets))))
    return Plan(
        name,
        size,
        tuple(transfers),
        tuple(applies),
        period=len(sets),
        facts=(
            Fact("sets", _buckets(sets, pieces), "buckets averaged in each iteration"),
            Fact("fill", _buckets(fill, pieces), "further ones, where they cost no time"),
        ),
    )


def _buckets(sets: Sets, pieces: Sequence[Piece]) -> list[list[int]]:
    return [sorted({pieces[i].bucket for i in members}) for members in sets]
