"""Stream of samples that the members of a job read together, while members join, leave and fail.

The stream holds the permutations of all passes one after the other. In each round every member
reads one batch. After a change of members the rest of the stream is dealt to the members that there
are now, with the samples whose training was lost with a failed member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.data.numbers import require_count

Range = tuple[int, int]  # first position in the stream, and the position after the last one


class SampleStream:
    """Samples of one job. All members have equal streams.

    Args:
        size: number of samples of the data set.
        batch_size: samples of a batch of one member. The last batches of the stream may be smaller,
            or larger by one.
        passes: number of passes over the data set.
        seed: seed of the order; another one in each pass.
        shuffle: whether the order is random; otherwise ascending.
    """

    def __init__(
        self, size: int, batch_size: int, passes: int = 1, seed: int = 0, *, shuffle: bool = True
    ):
        for name, value, least in (
            ("size", size, 1),
            ("batch_size", batch_size, 1),
            ("passes", passes, 1),
            ("seed", seed, 0),
        ):
            require_count(name, value, least=least)
        self._size, self._batch_size, self._seed, self._shuffle = size, batch_size, seed, shuffle
        self._total = size * passes
        self._pool: list[Range] = [(0, self._total)]
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings, which must be equal on all members."""
        return {
            "size": self._size,
            "batch_size": self._batch_size,
            "positions": self._total,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    @property
    def remaining(self) -> int:
        """Return the number of samples that were not dealt before the present members."""
        return sum(stop - start for start, stop in self._pool)

    @property
    def state(self) -> list[Range]:
        """Return the positions that were not dealt before the present members."""
        return list(self._pool)

    def load(self, state: Iterable[Iterable[int]]) -> None:
        """Continue from the state of another member."""
        self._pool = [(start, stop) for start, stop in state]

    # ---- rounds -----------------------------------------------------------------------------

    def rounds(self, members: int) -> int:
        """Return the number of rounds in which each member reads a batch.

        Fewer samples than members are not dealt.
        """
        full, rest = divmod(self.remaining, members * self._batch_size)
        return full + (rest >= members)

    def batch(self, number: int, rank: int, members: int) -> list[int]:
        """Return the samples of a member in a round.

        Args:
            number: number of the round among those of the present members, below `rounds`.
            rank: rank of the member.
            members: number of members.
        """
        taken = self._places(number, rank, members)
        return [self._sample(q) for start, stop in self._ranges(taken) for q in range(start, stop)]

    def _places(self, number: int, rank: int, members: int) -> range:
        """Return the places of a batch among the samples that remain."""
        whole = members * self._batch_size
        start, count = number * whole, whole
        if number == self.rounds(members) - 1:
            count = self.remaining - start
        each, more = divmod(count, members)
        first = start + rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def _ranges(self, taken: range) -> list[Range]:
        """Return the positions of places among the samples that remain."""
        found, before = list[Range](), 0
        for start, stop in self._pool:
            first = max(taken.start - before, 0) + start
            last = min(taken.stop - before + start, stop)
            if first < last:
                found.append((first, last))
            before += stop - start
        return found

    def _sample(self, position: int) -> int:
        number, place = divmod(position, self._size)
        return int(self._order(number)[place])

    def _permutation(self, number: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._size)
        return np.random.default_rng([self._seed, number]).permutation(self._size)

    def read_count(self, rounds: int, members: int) -> int:
        """Return the number of samples that were dealt up to a round of the present members."""
        return self._total - self.remaining + self._dealt(rounds, members)

    def _dealt(self, rounds: int, members: int) -> int:
        if rounds < self.rounds(members):
            return rounds * members * self._batch_size
        return self.remaining if rounds else 0

    # ---- changes ----------------------------------------------------------------------------

    def advance(self, rounds: int, members: int, lost: Mapping[int, int] | None = None) -> None:
        """Remove the samples of the rounds that the members have read.

        Args:
            rounds: number of rounds.
            members: number of members in these rounds.
            lost: by rank of each member that has failed, the first round whose samples are dealt
                again, because their training was lost.
        """
        dealt = self._dealt(rounds, members)
        again = [
            one
            for rank, first in sorted((lost or {}).items())
            for number in range(first, rounds)
            for one in self._ranges(self._places(number, rank, members))
        ]
        self._pool = [*again, *self._ranges(range(dealt, self.remaining))]
