"""Data injection: selection of the workers and samples that are shared in each iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from offbeat.data.numbers import require_count, require_fraction
from offbeat.data.place import place

ROUNDING = 1e-9  # tolerance of the floating-point error before rounding


@dataclass(frozen=True)
class Injection:
    """In each iteration a random `alpha * N` of the N workers share `beta` of their batch with all.

    The sharing workers are drawn with `seed`, equally on every rank. Their number is `m = alpha *
    N`, rounded half up, and at least one unless alpha is 0. A single worker shares nothing.

    To keep the effective batch size b, a worker loads only `b' = b / (1 + beta * m)` samples,
    rounded up. The sharing workers together share the missing `b - b'` samples: each of them
    shares `beta * b'`, rounded so that the sum is exact. The workers drawn first may share one
    sample more. If `b - b'` is 0, no worker shares. All workers, including the sharing ones,
    receive all shared samples. Every batch therefore has exactly b samples, and the shared samples
    of a worker occur twice in its own batch.

    Attributes:
        alpha: share of the workers that share samples, from 0 to 1.
        beta: share of a batch that is shared, from 0 to 1.
        seed: seed of the random selection.

    Source: SelSync (Tyagi, Swamy), after ScaDLES (Tyagi, Swamy), IEEE Big Data 2022.
    """

    alpha: float
    beta: float
    seed: int = 0

    def __post_init__(self) -> None:
        require_fraction("alpha", self.alpha, "it is the fraction of workers that share")
        require_fraction("beta", self.beta, "it is the fraction of a batch that is shared")
        require_count("seed", self.seed, least=0)

    def batch_size(self, batch: int, workers: int | None = None) -> int:
        """Return b', the batch size of a worker's own loader.

        Args:
            batch: effective batch size b.
            workers: number of workers; by default that of the job.

        Raises:
            ValueError: a worker would have to share more samples than it loads.
        """
        require_count("batch", batch)
        workers = place()[1] if workers is None else workers
        times = 1 + self.beta * self.sharing(workers)
        if batch < times - ROUNDING:
            raise ValueError(
                f"batch ({batch}) must be at least 1 + beta * sharers ({times:g}, with alpha "
                f"{self.alpha:g}, beta {self.beta:g}, {workers} workers), as more would be "
                "injected than there is data; raise batch or lower alpha or beta"
            )
        return math.ceil(batch / times - ROUNDING)

    def sharing(self, workers: int) -> int:
        """Return the number of workers that share in each iteration.

        Args:
            workers: number of workers.
        """
        require_count("workers", workers)
        if workers == 1 or not self.alpha or not self.beta:
            return 0
        return max(1, math.floor(self.alpha * workers + 0.5 + ROUNDING))

    def sharers(self, iteration: int, workers: int) -> tuple[int, ...]:
        """Return the workers that share in an iteration, in the order in which they are drawn.

        Args:
            iteration: number of the iteration.
            workers: number of workers.
        """
        rng = np.random.default_rng([self.seed, iteration])
        drawn = rng.permutation(workers)[: self.sharing(workers)]
        return tuple(drawn.tolist())

    def given(self, batch: int, workers: int) -> tuple[int, ...]:
        """Return the number of samples that each sharing worker shares.

        Args:
            batch: effective batch size b.
            workers: number of workers.

        Returns:
            Numbers in the order of `sharers`; the sum is b - b'.
        """
        sharing = self.sharing(workers)
        missing = batch - self.batch_size(batch, workers)
        return tuple((missing + i) // sharing for i in reversed(range(sharing)))

    def chosen(self, iteration: int, worker: int, own: int, count: int) -> list[int]:
        """Return the indices of the samples that a worker shares.

        Args:
            iteration: number of the iteration.
            worker: rank of the worker.
            own: number of samples that the worker has loaded.
            count: number of samples to share.
        """
        rng = np.random.default_rng([self.seed, iteration, worker])
        return rng.permutation(own)[:count].tolist()
