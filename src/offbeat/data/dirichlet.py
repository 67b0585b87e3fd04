"""Label skew by a Dirichlet distribution: each worker has its own mixture of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.data.apportion import apportion
from offbeat.data.labels import classes_of
from offbeat.data.numbers import (
    relative_sizes,
    require_count,
    require_enough,
    require_positive,
    require_sizes,
)
from offbeat.data.partition import Partition


@dataclass(frozen=True)
class Dirichlet:
    """Partition that divides each class among the workers in proportions from Dirichlet(alpha, ..,
    alpha).

    The number of samples of a worker is random as well. A worker with fewer than `least` samples
    receives random samples of the worker with the most samples.

    Attributes:
        alpha: concentration; 0.1 gives a strong skew, 100 almost none.
        sizes: relative mean proportions, one per worker; equal if None. The parameter of worker n
            is `alpha * N * size_n / sum`.
        least: smallest number of samples of a worker.

    Source: Hsu, Qi, Brown, arXiv:1909.06335; by class as in Yurochkin et al., arXiv:1905.12022.
    """

    alpha: float = 0.5
    sizes: tuple[float, ...] | None = None
    least: int = 1

    def __post_init__(self) -> None:
        require_positive("alpha", self.alpha, "use Chunks() for no skew at all")
        require_count("least", self.least)
        require_sizes(self.sizes)

    def partition(self, labels: Any, workers: int, *, seed: int = 0) -> Partition:
        """Return the partition of labelled data; equal seeds give equal partitions.

        Args:
            labels: class of each sample, as integers or texts.
            workers: number of workers.
            seed: seed of the random assignment.

        Raises:
            ValueError: there are fewer than `least` samples per worker.
        """
        known = classes_of(labels)
        require_count("workers", workers)
        require_count("seed", seed, least=0)
        require_enough(len(known.codes), workers, self.least)
        sizes = relative_sizes(self.sizes, workers)
        parameters = self.alpha * workers * sizes / sizes.sum()
        rng = np.random.default_rng(seed)
        shares: list[list[NDArray[np.int64]]] = [[] for _ in range(workers)]
        for members in known.members():
            counts = apportion(len(members), rng.dirichlet(parameters))
            pieces = np.split(rng.permutation(members), np.cumsum(counts)[:-1])
            for share, piece in zip(shares, pieces, strict=True):
                share.append(piece)
        joined = [rng.permutation(np.concatenate(share)) for share in shares]
        _raise_to_least(joined, self.least)
        return Partition(tuple(map(np.sort, joined)), f"dirichlet(alpha={self.alpha:g})")


def _raise_to_least(shares: list[NDArray[np.int64]], least: int) -> None:
    """Move samples from the largest share to shares below `least`, one at a time.

    Moved samples are the last of a share, so the order of each share must be random.
    """
    for poor in range(len(shares)):
        while len(shares[poor]) < least:
            rich = max(range(len(shares)), key=lambda n: len(shares[n]))
            shares[poor] = np.append(shares[poor], shares[rich][-1])
            shares[rich] = shares[rich][:-1]
