"""Partitions of data sets: chunks independent of labels, and two kinds of label skew."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.data.labels import classes_of
from offbeat.data.numbers import require_count, require_positive
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
        sizes, rng = _prepare(self.sizes, samples, workers, seed)
        counts = apportion(samples, sizes, least=1)
        order = rng.permutation(samples)
        pieces = np.split(order if self.shuffle else np.arange(samples), np.cumsum(counts)[:-1])
        text = "" if self.sizes is None else f"sizes={','.join(f'{s:g}' for s in self.sizes)}"
        return Partition(tuple(map(np.sort, pieces)), f"chunks({text})")


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
        sizes, rng = _prepare(self.sizes, len(known.codes), workers, seed, self.least)
        parameters = self.alpha * workers * sizes / sizes.sum()
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
        sizes, rng = _prepare(self.sizes, len(known.codes), workers, seed)
        self._require_fit(len(known.names), workers)
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


def apportion(total: int, weights: NDArray[np.float64], least: int = 0) -> NDArray[np.int64]:
    """Return counts that add up to `total`, in proportion to `weights`, by the method of largest
    remainders.

    Of equal remainders the first is rounded up. Counts below `least` are then raised at the cost of
    the largest counts. `total` must be at least `least` times the number of weights.
    """
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    while counts.min() < least:
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts


def _prepare(
    sizes: Sequence[float] | None, samples: int, workers: int, seed: int, least: int = 1
) -> tuple[NDArray[np.float64], np.random.Generator]:
    """Check the arguments of a partition; return the relative sizes and the random generator.

    Raises:
        ValueError: an argument is invalid, or there are fewer than `least` samples per worker.
    """
    require_count("workers", workers)
    require_count("seed", seed, least=0)
    if samples < workers * least:
        raise ValueError(
            f"samples ({samples}) must be at least {workers * least}, {least} for each of "
            f"{workers} workers; give more data or fewer workers"
        )
    return relative_sizes(sizes, workers), np.random.default_rng(seed)


def relative_sizes(sizes: Sequence[float] | None, workers: int) -> NDArray[np.float64]:
    """Return the sizes as an array, equal sizes for None. Raise ValueError unless there is one per
    worker.
    """
    if sizes is None:
        return np.ones(workers)
    if len(sizes) != workers:
        raise ValueError(
            f"sizes ({len(sizes)} entries) must have one entry per worker ({workers}); "
            "leave sizes out for equal ones"
        )
    return np.asarray(sizes, dtype=np.float64)


def require_sizes(sizes: Sequence[float] | None) -> None:
    """Raise ValueError unless all sizes are finite and above 0."""
    for worker, size in enumerate(sizes or ()):
        require_positive(f"sizes[{worker}]", size, "leave out a worker that shall have no data")
