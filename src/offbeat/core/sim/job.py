"""Jobs and runs: what an engine is given, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.lines import Line
from offbeat.core.sim.outcomes import Outcomes
from offbeat.core.sim.ranks import Ranks, alike
from offbeat.core.sim.spread import Spread
from offbeat.core.sim.timed_program import TimedProgram

# Of all ranks: a float if they are all alike, else an array with one value per rank.
Times = Any


class Factors:
    """Compute times of ranks relative to the profile's."""

    def __init__(self, profile: Profile, ranks: Ranks, iterations: int, seed: int) -> None:
        self._scale = np.asarray(ranks.compute_scale(profile), dtype=float)
        self._noise = ranks.noise(iterations, profile, seed)
        self.alike = len(self._scale) == 1 or (self._noise is None and alike(self._scale.tolist()))

    def of(self, iteration: int, repeat: int = 1) -> Times:
        """All ranks' factors in one iteration, or the mean of as many as it stands for."""
        factors = self._scale
        if self._noise is not None:
            factors = factors * (1 + (self._noise[iteration] - 1) / repeat**0.5)
        return factors[0].item() if self.alike else factors


@dataclass
class Job:
    """What an engine needs: one plan on all ranks, for so many iterations.

    `horizon` counts iterations beyond the last one that its messages may depend on. Links in
    `coupled` slow each other down.
    """

    plan: Plan
    profile: Profile
    ranks: Ranks
    iterations: int
    horizon: int
    costs: Costs
    outcomes: Outcomes
    factors: Factors
    spread: Spread
    coupled: frozenset[str]
    repeats: Mapping[int, int]

    def program(self, rank: int = 0) -> TimedProgram:
        return TimedProgram(self.costs, self.outcomes, rank, self.repeats)

    @property
    def links(self) -> list[str]:
        """The profile's links and the plan's channels."""
        return [*dict.fromkeys([*(link.name for link in self.profile.links), *self.plan.links])]


@dataclass(frozen=True)
class Run:
    """What happened. `ends_s` and `waited_s` are [iteration, row].

    There is one row, one program and one line per link for every rank, or a single one that
    stands for all of them. `known_s`: when the outcome of a vote was known, by name and iteration.
    """

    job: Job
    programs: list[TimedProgram]
    lines: Mapping[str, Sequence[Line]]
    ends_s: NDArray[np.float64]
    waited_s: NDArray[np.float64]
    known_s: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def program(self, rank: int) -> TimedProgram:
        return self.programs[min(rank, len(self.programs) - 1)]

    def line(self, link: str, rank: int) -> Line:
        return self.lines[link][min(rank, len(self.lines[link]) - 1)]

    def factor(self, iteration: int, rank: int) -> float:
        """One rank's compute time in an iteration relative to the profile's."""
        factors = self.job.factors.of(iteration, self.program(rank).repeat(iteration))
        return float(factors[rank]) if isinstance(factors, np.ndarray) else factors
