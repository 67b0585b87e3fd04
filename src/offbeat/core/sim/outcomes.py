"""Outcomes of votes in a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CHUNK = 256

Votes = Mapping[str, float | Sequence[bool]]
"""Probability of a yes, or the outcomes of a run by iteration, for each vote by name."""


class Outcomes:
    """Outcome of each vote in each iteration, drawn or replayed.

    A drawn outcome depends on vote, iteration and seed only, not on the number of iterations.

    Args:
        names: names of the plan's votes.
        votes: for a vote by name, the probability of a yes (default 1), or recorded outcomes. After
            their end, recorded outcomes are repeated from the beginning.
        seed: seed of the draws.

    Raises:
        ValueError: `votes` names an unknown vote, or a value is invalid.
    """

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

    def is_yes(self, name: str | None, iteration: int) -> bool:
        """Return whether the outcome of a vote is yes in an iteration.

        Without a vote (`name` is None) and before the first iteration it is yes.
        """
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
