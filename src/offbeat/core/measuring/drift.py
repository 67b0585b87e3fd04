"""Drift: measured times of links and ranks relative to their profile, in steps with hysteresis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import with_slower_links, with_slower_replicas

STEPS = 4  # steps of a ratio per factor of 2: one step is a factor of 1.19
LEAST_CHANGE = 2  # steps of a change: a factor of 1.41
CONFIRMATIONS = 3  # successive boundaries that must agree on a change
MOST_STEPS = 16  # a factor of 16; times beyond it are those of a cut, not of a rate


def steps_of(ratio: float) -> int:
    """Return the steps of a ratio above 0: `4 log2(ratio)`, rounded."""
    return max(-MOST_STEPS, min(MOST_STEPS, round(STEPS * math.log2(ratio))))


def weighted_median(values: Iterable[tuple[float, float]]) -> float | None:
    """Return the smallest value up to which at least half of the weight lies; None without weight.

    Args:
        values: pairs of a value and its weight.
    """
    ordered = sorted((value, weight) for value, weight in values if weight > 0)
    half, total = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        total += weight
        if total >= half:
            return value
    return None


@dataclass
class Level:
    """Measured time of one link or replica relative to the profile, in steps.

    The level changes if the ratios of `CONFIRMATIONS` successive boundaries depart from it by at
    least `LEAST_CHANGE` steps in the same direction. It then becomes their median.

    Attributes:
        steps: steps of the level: 0 for times as in the profile.
        recent: steps of the last boundaries that departed from the level.
    """

    steps: int = 0
    recent: list[int] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """Measured time relative to the profile."""
        return 2.0 ** (self.steps / STEPS)

    def add(self, ratio: float | None) -> bool:
        """Add the ratio of one boundary. Return whether the level has changed.

        Args:
            ratio: measured time relative to the profile; None if nothing was measured, which
                changes nothing.
        """
        if ratio is None or not 0 < ratio < math.inf:
            return False
        steps = steps_of(ratio)
        if abs(steps - self.steps) < LEAST_CHANGE:
            self.recent = []
            return False
        if any((steps > self.steps) != (earlier > self.steps) for earlier in self.recent):
            self.recent = []
        self.recent.append(steps)
        if len(self.recent) < CONFIRMATIONS:
            return False
        self.steps, self.recent = sorted(self.recent)[CONFIRMATIONS // 2], []
        return True


@dataclass
class Drift:
    """Levels of all links and replicas of a job.

    Attributes:
        links: level of each link between replicas.
        replicas: level of the compute time of each replica.
    """

    links: dict[str, Level]
    replicas: list[Level]

    @classmethod
    def of(cls, profile: Profile) -> Drift:
        """Return the levels of a job whose times are those of its profile."""
        links = {link.name: Level() for link in profile.links}
        return cls(links, [Level() for _ in range(profile.world_size)])

    def add(
        self, links: Mapping[str, float | None], replicas: Sequence[float | None]
    ) -> tuple[list[str], list[int]]:
        """Add the ratios of one boundary. Return the links and replicas whose level has changed.

        Args:
            links: ratio of each link; None if nothing was measured.
            replicas: ratio of each replica; None if nothing was measured.
        """
        changed_links = [name for name, ratio in links.items() if self.links[name].add(ratio)]
        changed = [i for i, ratio in enumerate(replicas) if self.replicas[i].add(ratio)]
        return changed_links, changed

    def profile(self, base: Profile) -> Profile:
        """Return the profile with the times of all levels.

        Args:
            base: profile to which the levels refer.
        """
        slower = with_slower_links(base, {name: one.factor for name, one in self.links.items()})
        return with_slower_replicas(slower, [one.factor for one in self.replicas])

    def capture(self) -> dict[str, Any]:
        """Return the levels for a checkpoint."""
        return {
            "links": {name: [one.steps, *one.recent] for name, one in self.links.items()},
            "replicas": [[one.steps, *one.recent] for one in self.replicas],
        }

    def resume(self, captured: Mapping[str, Any]) -> None:
        """Restore the result of `capture`."""
        self.links = {name: Level(one[0], one[1:]) for name, one in captured["links"].items()}
        self.replicas = [Level(one[0], one[1:]) for one in captured["replicas"]]
