"""Time: one label for everybody, in units of a gradient's mean time.

Clocks are compared once, as NTP does: of several round trips to the first worker the shortest one
tells the offset best. From then on seconds mean the same everywhere. The unit is agreed on while
training runs, and agreed on again when it drifts; a change bends the line of labels at a second
that all workers know, so it is the same line everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DRIFT = 0.2  # of the unit, or of the rate of exchanges, before it is agreed on anew


@dataclass(frozen=True)
class RoundTrip:
    """When a question left and its answer arrived here, and what the other clock said meanwhile."""

    left_s: float
    theirs_s: float
    arrived_s: float


def offset_s(trips: Sequence[RoundTrip]) -> float:
    """What the other clock is ahead of this one, to half of the shortest trip."""
    best = min(trips, key=lambda trip: trip.arrived_s - trip.left_s)
    return best.theirs_s - (best.left_s + best.arrived_s) / 2


class Line(NamedTuple):
    """How labels run: from this second of the common clock on, at this label, in this unit."""

    since_s: float = 0.0
    label: float = 0.0
    unit_s: float | None = None


class Clock:
    """Labels of a worker whose own clock is behind the common one by `ahead_s`.

    Until there is a unit it stands at 0.
    """

    def __init__(self, ahead_s: float = 0.0, own_s: Callable[[], float] = time.perf_counter):
        self.ahead_s, self._own_s = ahead_s, own_s
        self.line = Line()

    @property
    def unit_s(self) -> float | None:
        """Seconds."""
        return self.line.unit_s

    def common_s(self) -> float:
        """Seconds on the common clock."""
        return self._own_s() + self.ahead_s

    def now(self) -> float:
        """The label of now."""
        return self.at(self.common_s())

    def agree(self, unit_s: float, since_s: float) -> None:
        """A unit lasts so long from this second of the common clock on."""
        self.line = Line(since_s, self.at(since_s), unit_s)

    def seconds_until(self, label: float) -> float | None:
        """From now on; None without a unit."""
        return None if self.unit_s is None else (label - self.now()) * self.unit_s

    def at(self, common_s: float) -> float:
        """The label of a second of the common clock."""
        since_s, label, unit_s = self.line
        return label if unit_s is None else label + max(common_s - since_s, 0.0) / unit_s
