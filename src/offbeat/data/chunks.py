"""Partition of data into chunks, independent of labels."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np

from offbeat.data.apportion import apportion
from offbeat.data.numbers import relative_sizes, require_count, require_enough, require_sizes
from offbeat.data.partition import Partition


@dataclass(frozen=True)
class Chunks:
    """Disjoint chunks of the data (default data partitioning, DefDP). Every worker has at least one
    sample.

    Attributes:
        sizes: relative sizes, one per worker; equal if None. Sizes whose sum is the number of
            samples are exact counts.
        shuffle: whether samples are assigned at random. False keeps the order of the data, which is
            skewed if the data is sorted.
    """

    sizes: tuple[float, ...] | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        require_sizes(self.sizes)

    def partition(self, data: int | Sized, workers: int, *, seed: int = 0) -> Partition:
        """Return the partition of a data set, or of a number of samples; equal seeds give equal
        partitions.

        Args:
            data: data set or number of samples.
            workers: number of workers.
            seed: seed of the random assignment.

        Raises:
            ValueError: there are fewer samples than workers.
        """
        samples = len(data) if isinstance(data, Sized) else int(data)
        require_count("workers", workers)
        require_count("seed", seed, least=0)
        require_enough(samples, workers)
        counts = apportion(samples, relative_sizes(self.sizes, workers), least=1)
        order = np.random.default_rng(seed).permutation(samples)
        pieces = np.split(order if self.shuffle else np.arange(samples), np.cumsum(counts)[:-1])
        sizes = "" if self.sizes is None else f"sizes={','.join(f'{s:g}' for s in self.sizes)}"
        return Partition(tuple(map(np.sort, pieces)), f"chunks({sizes})")
