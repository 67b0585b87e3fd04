"""Spread: how the times of messages vary from one to the next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan, Transfer
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import lognormal

_KEPT = 64  # iterations whose factors are kept


class Spread:
    """Lognormal factors with mean 1 on the times of messages, by the jitter of their links.

    Drawn per transfer and iteration, so that both engines and a longer simulation draw the same.
    Groups that send the same transfer at once share its factor. `least`: of all their jitters.
    """

    def __init__(self, plan: Plan, profile: Profile, seed: int, least: float = 0.0) -> None:
        self._seed = seed
        self._places = {id(t): place for place, t in enumerate(plan.transfers)}
        jitters = [max(profile.link(t.link).jitter, least) for t in plan.transfers]
        self._jitters = np.array(jitters, dtype=np.float64)
        self.any = any(jitters)
        self._factors: dict[int, NDArray[np.float64]] = {}

    def factor(self, t: Transfer, iteration: int) -> float:
        """What the time of one message is multiplied by."""
        return float(self._of(iteration)[self._places[id(t)]]) if self.any else 1.0

    def _of(self, iteration: int) -> NDArray[np.float64]:
        if iteration not in self._factors:
            if len(self._factors) == _KEPT:
                del self._factors[next(iter(self._factors))]
            # A stream of its own: compute draws from the seed itself.
            draws = np.random.default_rng((self._seed, 1, iteration))
            normal = draws.standard_normal(len(self._jitters))
            self._factors[iteration] = lognormal(normal, self._jitters)
        return self._factors[iteration]
