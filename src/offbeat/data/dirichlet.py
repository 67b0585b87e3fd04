"""Label skew by a Dirichlet distribution: every worker has its own mix of classes."""

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
    """Each class is divided among the workers in proportions from Dirichlet(alpha, .., alpha).

    Small `alpha` (0.1) is strong skew, large (100) is none. `sizes` (relative, one per worker) are
    the mean proportions, equal by default: worker n's parameter is `alpha * N * size_n / sum`. How
    many samples a worker has is random as well. Whoever has fewer than `least` is given random
    ones of the worker with the most.

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
        """The partition of data with these labels (integers or texts); one seed, one partition."""
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
        _fill(joined, self.least)
        return Partition(tuple(map(np.sort, joined)), f"dirichlet(alpha={self.alpha:g})")


def _fill(shares: list[NDArray[np.int64]], least: int) -> None:
    """Give the poor some samples of the richest, one at a time. Their order must be random."""
    for poor in range(len(shares)):
        while len(shares[poor]) < least:
            rich = max(range(len(shares)), key=lambda n: len(shares[n]))
            shares[poor] = np.append(shares[poor], shares[rich][-1])
            shares[rich] = shares[rich][:-1]
