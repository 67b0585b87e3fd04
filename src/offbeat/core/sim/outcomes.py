"""Outcomes: which votes say yes in a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CHUNK = 256

Votes = Mapping[str, float | Sequence[bool]]
"""By vote: how probable a yes is, or the outcomes of a run, iteration by iteration."""


class Outcomes:
    """One draw per vote and iteration, yes with the probability in `votes` (default 1), or what
    was recorded, from the beginning again where that ends. A seed gives the same draws however
    many iterations are asked for. ValueError on unknown votes."""

    def __init__(self, names: Sequence[str], votes: Votes, seed: int) -> None:
        for name, given in votes.items():
            if name not in names:
                known = ", ".join(names) or "none"
                raise ValueError(f"votes ({name!r}) must name a vote of the plan: {known}")
            if isinstance(given, Sequence):
                if not given:
                    raise ValueError(f"votes[{name!r}] ([]) must hold at least one outcome")
            elif not 0 <= given <= 1:
                raise ValueError(f"votes[{name!r}] ({given}) must lie between 0 and 1")
        self._replayed = {n: given for n, given in votes.items() if isinstance(given, Sequence)}
        chances = {n: given for n, given in votes.items() if not isinstance(given, Sequence)}
        self._probability = {name: chances.get(name, 1.0) for name in names}
        self._draws = {n: np.random.default_rng([seed, i]) for i, n in enumerate(names)}
        self._drawn: dict[str, list[bool]] = {name: [] for name in names}

    def yes(self, name: str | None, iteration: int) -> bool:
        """Whether a vote (None: no vote) says yes in an iteration; yes before the first one."""
        if name is None or iteration < 0:
            return True
        replayed = self._replayed.get(name)
        if replayed is not None:
            return replayed[iteration % len(replayed)]
        if self._probability[name] == 1:
            return True
        drawn = self._drawn[name]
        while len(drawn) <= iteration:
            more = self._draws[name].random(CHUNK) < self._probability[name]
            drawn += more.tolist()
        return drawn[iteration]
