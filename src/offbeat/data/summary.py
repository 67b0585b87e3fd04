"""What each worker reads of a partition, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offbeat.data.labels import classes_of
from offbeat.data.partition import Partition


@dataclass(frozen=True)
class Reader:
    """One worker: the chunks it reads in order, its samples in all and by class.

    `weight` is its share of all workers' samples, `skew` half the sum of absolute differences
    between its mix of classes and that of all data: 0 is the same mix, 1 has nothing in common.
    """

    worker: int
    reads: tuple[int, ...]
    samples: int
    weight: float
    skew: float
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """All workers; `chunks` are the samples by chunk and class."""

    split: str
    workers: int
    samples: int
    classes: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    per_worker: tuple[Reader, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"schema": 1, **asdict(self)}


def summarize(partition: Partition, labels: Any, *, circular: bool = False) -> Summary:
    """Who reads what in an epoch; `circular` as `SelDP` reads, else as `DefDP`."""
    chunks, workers = partition.histogram(labels), partition.workers
    mix = chunks.sum(axis=0) / partition.samples
    readers = []
    for n in range(workers):
        reads = tuple((n + i) % workers for i in range(workers if circular else 1))
        histogram = chunks[list(reads)].sum(axis=0)
        samples = int(histogram.sum())
        weight = 1 / workers if circular else samples / partition.samples
        skew = float(np.abs(histogram / samples - mix).sum() / 2)
        readers.append(Reader(n, reads, samples, weight, skew, tuple(histogram.tolist())))
    split = f"seldp of {partition.split}" if circular else partition.split
    names = classes_of(labels).names
    by_chunk = tuple(map(tuple, chunks.tolist()))
    return Summary(split, workers, partition.samples, names, by_chunk, tuple(readers))
