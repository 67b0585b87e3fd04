"""Outcomes: which votes say yes in a simulation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offbeat.plan import Plan

CHUNK = 256


class Outcomes:
    """One draw per vote and iteration, yes with the probability in `votes` (default 1). A seed
    gives the same draws however many iterations are asked for. ValueError on unknown votes."""

    def __init__(self, plan: Plan, votes: Mapping[str, float], seed: int) -> None:
        names = [vote.name for vote in plan.votes]
        for name, probability in votes.items():
            if name not in names:
                known = ", ".join(names) or "none"
                raise ValueError(f"votes ({name!r}) must name a vote of the plan: {known}")
            if not 0 <= probability <= 1:
                raise ValueError(f"votes[{name!r}] ({probability}) must lie between 0 and 1")
        self.random = any(0 < probability < 1 for probability in votes.values())
        self._probability = {name: votes.get(name, 1.0) for name in names}
        self._draws = {n: np.random.default_rng([seed, i]) for i, n in enumerate(names)}
        self._drawn: dict[str, list[bool]] = {name: [] for name in names}

    def yes(self, name: str | None, iteration: int) -> bool:
        """Whether a vote (None: no vote) says yes in an iteration."""
        if name is None or self._probability[name] == 1:
            return True
        drawn = self._drawn[name]
        while len(drawn) <= iteration:
            more = self._draws[name].random(CHUNK) < self._probability[name]
            drawn += more.tolist()
        return drawn[iteration]
