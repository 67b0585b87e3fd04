"""Chunks: every worker owns a part of the data, whatever its labels."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np

from offbeat.data.apportion import apportion
from offbeat.data.numbers import relative_sizes, require_count, require_enough, require_sizes
from offbeat.data.partition import Partition


@dataclass(frozen=True)
class Chunks:
    """Unique chunks of the data (default data partitioning, DefDP).

    `sizes` are relative, one per worker, equal by default. They are exact counts if they add up to
    the number of samples. Every worker has at least one. `shuffle=False` cuts the data in its own
    order; that is skewed where the data is sorted.
    """

    sizes: tuple[float, ...] | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        require_sizes(self.sizes)

    def partition(self, data: int | Sized, workers: int, *, seed: int = 0) -> Partition:
        """The partition of so many samples, or of a data set; the same for the same seed."""
        samples = len(data) if isinstance(data, Sized) else int(data)
        require_count("workers", workers)
        require_count("seed", seed, least=0)
        require_enough(samples, workers)
        counts = apportion(samples, relative_sizes(self.sizes, workers), least=1)
        order = np.random.default_rng(seed).permutation(samples)
        pieces = np.split(order if self.shuffle else np.arange(samples), np.cumsum(counts)[:-1])
        sizes = "" if self.sizes is None else f"sizes={','.join(f'{s:g}' for s in self.sizes)}"
        return Partition(tuple(map(np.sort, pieces)), f"chunks({sizes})")
