"""Random variation of message times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan, Transfer
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import lognormal

_KEPT = 64  # number of iterations in the cache of factors


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
            # Use a separate stream, because compute jitter uses the seed itself.
            draws = np.random.default_rng((self._seed, 1, iteration))
            normal = draws.standard_normal(len(self._jitters))
            self._factors[iteration] = lognormal(normal, self._jitters)
        return self._factors[iteration]
