"""Clock that is common to all workers, with labels in units of the mean time of a gradient.

Each worker measures its offset to the first worker once, as NTP does: of several round trips, the
shortest one gives the most precise offset. From then on the common clock shows the same seconds on
all workers. The workers agree on the unit during training, and again if it drifts. Each change
takes effect at one second of the common clock, so the labels are the same on all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DRIFT = 0.2  # relative change of the unit or of the exchange rate that requires a new agreement


@dataclass(frozen=True)
class RoundTrip:
    """Local times of a request and its answer, and the time of the other clock in the answer."""

    left_s: float
    theirs_s: float
    arrived_s: float


def offset_s(trips: Sequence[RoundTrip]) -> float:
    """Return the seconds by which the other clock is ahead; the error is at most half of the
    shortest trip.
    """
    best = min(trips, key=lambda trip: trip.arrived_s - trip.left_s)
    return best.theirs_s - (best.left_s + best.arrived_s) / 2


class Line(NamedTuple):
    """Labels as a linear function of the common clock: at `since_s` the label is `label`, and it
    grows by 1 each `unit_s` seconds.
    """

    since_s: float = 0.0
    label: float = 0.0
    unit_s: float | None = None

    def label_at(self, common_s: float) -> float:
        """Return the label at a time of the common clock."""
        passed_s = max(common_s - self.since_s, 0.0)
        return self.label if self.unit_s is None else self.label + passed_s / self.unit_s

    def with_unit(self, unit_s: float, since_s: float) -> Line:
        """Return the labels with another unit in seconds, from `since_s` of the common clock on."""
        return Line(since_s, self.label_at(since_s), unit_s)


class Clock:
    """Clock of a worker. Labels are 0 until a unit is set.

    Attributes:
        ahead_s: seconds by which the common clock is ahead of the clock of this worker.
        line: current relation between labels and seconds of the common clock.
    """

    def __init__(self, ahead_s: float = 0.0, own_s: Callable[[], float] = time.perf_counter):
        self.ahead_s, self._own_s = ahead_s, own_s
        self.line = Line()

    @property
    def unit_s(self) -> float | None:
        """Return the seconds per unit, or None before the first agreement."""
        return self.line.unit_s

    def common_s(self) -> float:
        """Return the current time of the common clock in seconds."""
        return self._own_s() + self.ahead_s

    def now(self) -> float:
        """Return the current label."""
        return self.line.label_at(self.common_s())

    def follow(self, line: Line) -> None:
        """Use another relation between labels and seconds."""
        self.line = line

    def seconds_until(self, label: float) -> float | None:
        """Return the seconds from now to a label; None without a unit."""
        return None if self.unit_s is None else (label - self.now()) * self.unit_s
