"""Detection of repetitions disturbed by foreign load or by hosts behind their pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.jobs.machine_load import describe_foreign, disturbing_share

LATE = 0.03  # largest mean delay of a host, as a share of its compute


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Disturbance that invalidates one repetition as a measurement.

    Attributes:
        repetition: number of the repetition.
        foreign: share of processor time used by other programs; None if small or unknown.
        late: mean delay of the host of `rank` as a share of its compute; None if no host was late.
        rank: rank whose host was late most.
        pressure: share of time in which some process waited for a processor; None if unknown.
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
            causes.append(describe_foreign(self.foreign))
        if self.late is not None:
            causes.append(
                f"the host of rank {self.rank} was late by {100 * self.late:.0f} % of its compute "
                "on average"
            )
        return " and ".join(causes)


def disturbance_of(
    repetition: int,
    load: Mapping[str, Any] | None,
    paces: Mapping[int, Mapping[str, float] | None],
) -> Disturbance | None:
    """Return the disturbance of a repetition; None without one.

    Args:
        repetition: number of the repetition.
        load: record of `machine_load.Load` during the repetition; None if unknown.
        paces: adherence of each rank's host to its pace; None for a host at full speed.
    """
    late, rank = max(
        ((pace.get("mean", 0.0), rank) for rank, pace in paces.items() if pace),
        default=(0.0, None),
    )
    foreign, is_late = disturbing_share(load), late > LATE
    if foreign is None and not is_late:
        return None
    return Disturbance(
        repetition,
        foreign=foreign,
        late=late if is_late else None,
        rank=rank if is_late else None,
        pressure=(load or {}).get("pressure"),
    )


def describe_disturbances(disturbances: Sequence[Disturbance], label: str, count: int) -> str:
    """Return one sentence about the disturbed repetitions among `count`; empty for none."""
    if not disturbances:
        return ""
    many = f" in {len(disturbances)} of {count} repetitions" if count > 1 else ""
    worst = max(disturbances, key=lambda d: max(d.foreign or 0.0, d.late or 0.0))
    return f"{label} was disturbed{many}: {worst.text}."
