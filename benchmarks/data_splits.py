"""How a split divides labelled data: samples of each class that every worker reads.

    python benchmarks/data_splits.py --digits --split dirichlet --alpha 0.3 --workers 4
    python benchmarks/data_splits.py labels.npy --split label-skew --classes 3 --json

Labels are a .npy, .csv or .json file, or those of scikit-learn's handwritten digits. `-o` writes
the partition for `Partition.load`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from offbeat.data import Chunks, Dirichlet, LabelSkew, Partition
from offbeat.data.labels import classes_of

SPLITS = ("defdp", "seldp", "label-skew", "dirichlet")
PLAIN_WIDTH = 140  # columns of a table that goes into a file
SHADES = "·░▒▓█"  # none, then quarters of the largest number
MOST_CHUNKS = 6  # that are named one by one
MOST_COLUMNS = 16  # with more classes a worker is one strip of shades


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


# ---- labels and partitions ----------------------------------------------------------------------


def read_labels(path: Path | None, digits: bool) -> Any:
    """The labels of a file or of the digits; ValueError unless one of both is asked for.

    .npy holds an array, .json a list, .csv one label per row in its last column. The first row is
    a heading if all others are integers and it is not.
    """
    if (path is None) != digits:
        raise ValueError("give either a file of labels or --digits")
    if path is None:
        from sklearn.datasets import load_digits

        return load_digits().target.tolist()
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else _last_column(text)
    except ValueError as error:
        raise ValueError(f"{path} holds no labels ({error}); write them again") from None


def _last_column(text: str) -> list[str] | list[int]:
    column = [row[-1].strip() for row in csv.reader(text.splitlines()) if row]
    for first in (0, 1):
        with suppress(ValueError):
            return [int(label) for label in column[first:]]
    return column


def partition(
    split: str,
    labels: Any,
    workers: int,
    *,
    classes: int | None,
    alpha: float | None,
    sizes: str | None,
    seed: int,
) -> Partition:
    """The partition that the options describe; ValueError for one that the split does not have."""
    for option, value, owner in (
        ("--classes", classes, "label-skew"),
        ("--alpha", alpha, "dirichlet"),
    ):
        if value is not None and split != owner:
            raise ValueError(f"{option} ({value}) must come with --split {owner}, not {split}")
    relative = _sizes(sizes)
    if split == "label-skew":
        skew = LabelSkew(2 if classes is None else classes, relative)
        return skew.partition(labels, workers, seed=seed)
    if split == "dirichlet":
        mix = Dirichlet(0.5 if alpha is None else alpha, relative)
        return mix.partition(labels, workers, seed=seed)
    return Chunks(relative).partition(labels, workers, seed=seed)


def _sizes(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"--sizes ({text!r}) must be numbers with commas between: 1,2,1") from None


# ---- the picture --------------------------------------------------------------------------------


def draw(summary: Summary) -> Table:
    """One row per worker."""
    table = Table(
        title=f"{summary.split}: {summary.samples} samples, {summary.workers} workers",
        title_justify="left",
        caption="skew: 0 is the mix of all data, 1 has nothing in common with it",
        caption_justify="left",
        caption_style="dim",
    )
    for heading in ("worker", "reads chunks", "samples", "weight", "skew"):
        table.add_column(heading, justify="right")
    wide = len(summary.classes) > MOST_COLUMNS
    for heading in [f"{len(summary.classes)} classes"] if wide else summary.classes:
        table.add_column(heading, justify="left" if wide else "right", overflow="fold")
    most = max(max(reader.histogram) for reader in summary.per_worker)
    for reader in summary.per_worker:
        table.add_row(*_facts(reader), *_cells(reader, most, wide))
    return table


def shade(count: int, most: int) -> str:
    """Darker the more samples; only none at all is a dot."""
    return SHADES[-(-count * (len(SHADES) - 1) // most)]


def _facts(reader: Reader) -> list[str]:
    numbers = [str(chunk) for chunk in reader.reads]
    if len(numbers) > MOST_CHUNKS:
        numbers[2:-1] = [".."]
    facts = (str(reader.samples), f"{reader.weight:.3f}", f"{reader.skew:.2f}")
    return [str(reader.worker), " ".join(numbers), *facts]


def _cells(reader: Reader, most: int, wide: bool) -> list[str]:
    shades = [shade(count, most) for count in reader.histogram]
    if wide:
        return ["".join(shades)]
    return [f"{count} {s * 2}" for count, s in zip(reader.histogram, shades, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("labels", nargs="?", type=Path, help="a .npy, .csv or .json file")
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--split", choices=SPLITS, default="defdp")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--classes", type=int, help="label-skew: classes per worker; 2")
    parser.add_argument("--alpha", type=float, help="dirichlet: small is much skew; 0.5")
    parser.add_argument("--sizes", help="relative sizes, one per worker, as 1,2,1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    known = read_labels(args.labels, args.digits)
    made = partition(
        args.split,
        known,
        args.workers,
        classes=args.classes,
        alpha=args.alpha,
        sizes=args.sizes,
        seed=args.seed,
    )
    summary = summarize(made, known, circular=args.split == "seldp")
    if args.output is not None:
        made.save(args.output)
    if args.json:
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(draw(summary))


if __name__ == "__main__":
    main()
