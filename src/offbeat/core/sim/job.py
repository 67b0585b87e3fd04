"""Input and output of a simulation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan, Transfer
from offbeat.core.profile import Profile
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.link_queue import LinkQueue
from offbeat.core.sim.outcomes import Outcomes
from offbeat.core.sim.ranks import Ranks, lognormal
from offbeat.core.sim.timed_program import TimedProgram

_KEPT = 64  # number of iterations in the cache of factors
_KEPT_DRAWS = 1024  # number of iterations in the cache of draws of all simulations

# Times of all ranks: a float if all ranks are alike, else an array with one value per rank.
Times = Any


class Factors:
    """Factors of the ranks' compute times relative to the profile's compute times."""

    def __init__(self, profile: Profile, ranks: Ranks, iterations: int, seed: int) -> None:
        self._scale = np.asarray(ranks.compute_scale(profile), dtype=float)
        self._noise = ranks.noise(iterations, profile, seed)
        self._mean = 1.0 if self._noise is None else ranks.expected_noise(profile)
        equal = self._noise is None and self._scale.min() == self._scale.max()
        self.alike = len(self._scale) == 1 or bool(equal)
        self._rows = None if self._noise is None else list(self._scale * self._noise)

    def values(self, iteration: int, repeat: int = 1) -> Times:
        """Return the factors of all ranks in one iteration.

        If the iteration represents `repeat` iterations, return their mean: its jitter is smaller by
        the square root of `repeat`.
        """
        factors = self._scale
        if self._rows is not None and repeat == 1:
            factors = self._rows[iteration]
        elif self._noise is not None:
            factors = factors * (self._mean + (self._noise[iteration] - self._mean) / repeat**0.5)
        return factors[0].item() if self.alike else factors


class Spread:
    """Lognormal factors with mean 1 on message times, by the jitter of each link.

    A factor depends on seed, transfer and iteration only, so both engines and a longer simulation
    get equal factors. All groups of a transfer share its factor.

    Args:
        plan: plan with the transfers.
        profile: profile with the links' jitter.
        seed: seed of the draws.
        least: lower limit of the jitter of each link.
    """

    def __init__(self, plan: Plan, profile: Profile, seed: int, least: float = 0.0) -> None:
        self._seed = seed
        self._places = {id(t): place for place, t in enumerate(plan.transfers)}
        jitters = [max(profile.link(t.link).jitter, least) for t in plan.transfers]
        self._jitters = np.array(jitters, dtype=np.float64)
        self.any = any(jitters)
        self._factors: dict[int, NDArray[np.float64]] = {}

    def factor(self, t: Transfer, iteration: int) -> float:
        """Return the factor of a message's time."""
        return float(self._factors_of(iteration)[self._places[id(t)]]) if self.any else 1.0

    def _factors_of(self, iteration: int) -> NDArray[np.float64]:
        if iteration not in self._factors:
            if len(self._factors) == _KEPT:
                del self._factors[next(iter(self._factors))]
            normal = _normal_draws(self._seed, iteration, len(self._jitters))
            self._factors[iteration] = lognormal(normal, self._jitters)
        return self._factors[iteration]


@lru_cache(maxsize=_KEPT_DRAWS)
def _normal_draws(seed: int, iteration: int, count: int) -> NDArray[np.float64]:
    """Return the draws of an iteration's messages, which several simulations share."""
    # Use a separate stream, because compute jitter uses the seed itself.
    return np.random.default_rng((seed, 1, iteration)).standard_normal(count)


@dataclass
class Job:
    """Input of an engine.

    Attributes:
        plan: plan to simulate.
        profile: profile of model and network.
        ranks: differences between ranks.
        iterations: number of iterations in the result.
        horizon: number of iterations to simulate. The iterations after `iterations` are needed
            because their messages share bandwidth with earlier ones.
        costs: times and bytes of the plan.
        outcomes: outcomes of votes.
        factors: factors of compute times.
        spread: factors of message times.
        coupled: links that slow each other down.
        repeats: number of iterations that a phase represents, by phase; 1 for other phases.
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

    def pause_s(self, link: str) -> float | None:
        """Return the pause of a link after which messages take additional time; None if none
        does."""
        facts = self.profile.link(link)
        return facts.pause_s if facts.after_pause else None

    @property
    def links(self) -> list[str]:
        """Return the names of the profile's links and of the plan's links and channels."""
        return [*dict.fromkeys([*(link.name for link in self.profile.links), *self.plan.links])]


@dataclass(frozen=True)
class Run:
    """Result of an engine.

    A row represents one rank, or all ranks if there is a single row.

    Attributes:
        job: input of the engine.
        programs: program of each row.
        queues: for each link, the queue of each row.
        ends_s: end of each iteration, `[iteration, row]`.
        waited_s: seconds of waiting in each iteration, `[iteration, row]`.
        known_s: time at which the outcome of a vote is known, by name and iteration.
    """

    job: Job
    programs: list[TimedProgram]
    queues: Mapping[str, Sequence[LinkQueue]]
    ends_s: NDArray[np.float64]
    waited_s: NDArray[np.float64]
    known_s: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def program(self, rank: int) -> TimedProgram:
        return self.programs[min(rank, len(self.programs) - 1)]

    def queue_of(self, link: str, rank: int) -> LinkQueue:
        return self.queues[link][min(rank, len(self.queues[link]) - 1)]

    def factor(self, iteration: int, rank: int) -> float:
        """Return the factor of one rank's compute time in an iteration."""
        factors = self.job.factors.values(iteration, self.program(rank).repeat_count(iteration))
        return float(factors[rank]) if isinstance(factors, np.ndarray) else factors
