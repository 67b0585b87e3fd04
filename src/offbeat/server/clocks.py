"""Clocks of the workers on a server, without parameters. A worker's clock is the number of its next
push."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Clocks:
    """Clocks of the workers of one shard, or of a simulated server.

    Attributes:
        present: clock of each worker that has not left.
        after_last_push: clock after the last push of each worker, also of those that have left.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.present = dict.fromkeys(workers, 0)
        self.after_last_push: dict[int, int] = {}

    @property
    def lowest(self) -> float:
        """Lowest clock of all workers; infinite without workers."""
        return min(self.present.values(), default=math.inf)

    def join(self, rank: int, clock: int) -> None:
        """Add a worker with this clock. The clock of a known worker never decreases."""
        self.present[rank] = max(clock, self.present.get(rank, 0))

    def leave(self, rank: int) -> bool:
        """Remove a worker. Return whether it was there."""
        return self.present.pop(rank, None) is not None

    def advance(self, rank: int, clock: int) -> bool:
        """Pass a clock. Return False, without effect, if the worker's clock is greater already."""
        if clock < self.present[rank]:
            return False
        self.present[rank] = self.after_last_push[rank] = clock + 1
        return True
