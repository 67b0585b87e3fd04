"""Disturbed repetitions: other programs used the processors, or hosts missed their pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OFTEN = 0.1  # share of samples in which other programs may take processors from a run
LATE = 0.03  # of its compute, by which a host may be late on average


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Why one repetition is not a measurement.

    `foreign`: share of the processors' time that other programs took, None if that was little or
    is unknown. `late`: by how much of an iteration's compute the host of `rank` missed its pace on
    average, None if every host kept it. `pressure`: share of the time in which some process waited
    for a processor, None if unknown.
    """

    repetition: int
    foreign: float | None = None
    late: float | None = None
    rank: int | None = None
    pressure: float | None = None

    @property
    def text(self) -> str:
        """The causes as a phrase."""
        causes = []
        if self.foreign is not None:
            causes.append(f"other programs used {self.foreign:.0%} of the processors")
        if self.late is not None:
            causes.append(
                f"the host of rank {self.rank} was late by {self.late:.0%} of its compute on "
                "average"
            )
        return " and ".join(causes)


def disturbance_of(
    repetition: int,
    load: Mapping[str, Any] | None,
    paces: Mapping[int, Mapping[str, float] | None],
) -> Disturbance | None:
    """Return why a repetition is not a measurement, None if it is one.

    Args:
        repetition: its number.
        load: what `offbeat.lab.machine_load.Load` recorded beside it, None if nothing was.
        paces: by rank how its host kept its pace, None for a host without one.
    """
    load = load or {}
    late, rank = max(
        ((pace.get("mean", 0.0), rank) for rank, pace in paces.items() if pace),
        default=(0.0, None),
    )
    is_foreign, is_late = load.get("disturbed", 0.0) > OFTEN, late > LATE
    if not is_foreign and not is_late:
        return None
    return Disturbance(
        repetition,
        foreign=load["foreign"] if is_foreign else None,
        late=late if is_late else None,
        rank=rank if is_late else None,
        pressure=load.get("pressure"),
    )


def describe_disturbances(disturbances: Sequence[Disturbance], label: str, count: int) -> str:
    """Return one sentence about the disturbed ones of `count` repetitions; empty for none."""
    if not disturbances:
        return ""
    many = f" in {len(disturbances)} of {count} repetitions" if count > 1 else ""
    worst = max(disturbances, key=lambda d: max(d.foreign or 0.0, d.late or 0.0))
    return f"{label} was disturbed{many}: {worst.text}."
