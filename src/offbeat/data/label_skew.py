"""Label skew by number of classes: each worker has samples of only some classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.data.apportion import apportion
from offbeat.data.labels import classes_of
from offbeat.data.numbers import relative_sizes, require_count, require_enough, require_sizes
from offbeat.data.partition import Partition


@dataclass(frozen=True)
class LabelSkew:
    """Partition in which every worker owns samples of exactly `classes` classes.

    The numbers of workers per class differ by at most one. The workers of a class divide its
    samples in proportion to `sizes`, with at least one sample each. The total of a worker therefore
    also depends on its classes.

    Attributes:
        classes: number of classes per worker.
        sizes: relative sizes, one per worker; equal if None.
    """

    classes: int = 2
    sizes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require_count("classes", self.classes)
        require_sizes(self.sizes)

    def partition(self, labels: Any, workers: int, *, seed: int = 0) -> Partition:
        """Return the partition of labelled data; equal seeds give equal partitions.

        Args:
            labels: class of each sample, as integers or texts.
            workers: number of workers.
            seed: seed of the random assignment.

        Raises:
            ValueError: a class has no worker, or fewer samples than workers.
        """
        known = classes_of(labels)
        require_count("workers", workers)
        require_count("seed", seed, least=0)
        require_enough(len(known.codes), workers)
        self._require_fit(len(known.names), workers)
        sizes = relative_sizes(self.sizes, workers)
        rng = np.random.default_rng(seed)
        held = self._holdings(len(known.names), workers, rng)
        shares: list[list[NDArray[np.int64]]] = [[] for _ in range(workers)]
        for name, members, holds in zip(known.names, known.members(), held.T, strict=True):
            holders = np.flatnonzero(holds)
            if len(members) < len(holders):
                raise ValueError(
                    f"class {name} ({len(members)} samples) must have a sample for each of the "
                    f"{len(holders)} workers that hold it; lower classes ({self.classes})"
                )
            counts = apportion(len(members), sizes[holders], least=1)
            pieces = np.split(rng.permutation(members), np.cumsum(counts)[:-1])
            for worker, piece in zip(holders, pieces, strict=True):
                shares[worker].append(piece)
        joined = tuple(np.sort(np.concatenate(share)) for share in shares)
        return Partition(joined, f"label-skew(classes={self.classes})")

    def _require_fit(self, known: int, workers: int) -> None:
        if self.classes > known:
            raise ValueError(
                f"classes ({self.classes}) must be at most the {known} classes of the labels; "
                "lower it"
            )
        if self.classes * workers < known:
            raise ValueError(
                f"classes ({self.classes}) times workers ({workers}) must be at least the {known} "
                f"classes of the labels, or some are nobody's; raise classes to "
                f"{-(-known // workers)}"
            )

    def _holdings(self, known: int, workers: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return the classes of each worker, [workers, classes].

        Each worker in turn, in random order, receives the classes with the fewest workers so far;
        ties are broken at random. The numbers of workers per class therefore differ by at most one.
        """
        held = np.zeros((workers, known), dtype=np.bool_)
        for worker in rng.permutation(workers):
            order = rng.permutation(known)
            fewest = order[np.argsort(held.sum(axis=0)[order], kind="stable")]
            held[worker, fewest[: self.classes]] = True
        return held
