"""Data injection: who shares how many samples of a batch with all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from offbeat.data.numbers import require_count, require_fraction
from offbeat.data.place import place

ROUNDING = 1e-9  # what should be a whole number or a half may be off by less


@dataclass(frozen=True)
class Injection:
    """In each iteration a random `alpha * N` of the N workers share `beta` of their batch with all.

    The sharers are drawn with `seed`, the same on every rank. They number `m = alpha * N` rounded,
    half up, and at least one unless alpha is 0. A worker alone shares nothing.

    To keep the effective batch size b, a worker loads only `b' = b / (1 + beta * m)`, rounded up,
    and the sharers together give the `b - b'` that are missing: `beta * b'` each, rounded so that
    the sum is right (those drawn first may give one more; where `b - b'` is 0, nobody gives). All
    workers, sharers included, get all shared samples. So all batches have exactly b samples, and a
    sharer's shared ones count twice in its own.

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
        """b' of an effective batch of b samples: what a worker's own loader must yield.

        `workers` are those of the job by default. ValueError if a worker would have to share more
        than it loads.
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
        """How many workers share in each iteration."""
        require_count("workers", workers)
        if workers == 1 or not self.alpha or not self.beta:
            return 0
        return max(1, math.floor(self.alpha * workers + 0.5 + ROUNDING))

    def sharers(self, iteration: int, workers: int) -> tuple[int, ...]:
        """The workers that share in this iteration, in the order in which they were drawn."""
        rng = np.random.default_rng([self.seed, iteration])
        drawn = rng.permutation(workers)[: self.sharing(workers)]
        return tuple(drawn.tolist())

    def given(self, batch: int, workers: int) -> tuple[int, ...]:
        """Samples that each sharer gives, in the order of `sharers`; together b - b'."""
        sharing = self.sharing(workers)
        missing = batch - self.batch_size(batch, workers)
        return tuple((missing + i) // sharing for i in reversed(range(sharing)))

    def chosen(self, iteration: int, worker: int, own: int, count: int) -> list[int]:
        """Which of its `own` samples a worker gives."""
        rng = np.random.default_rng([self.seed, iteration, worker])
        return rng.permutation(own)[:count].tolist()
