"""Options of `offbeat data` to labels and partitions."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offbeat.cli.texts import require_file
from offbeat.data import Chunks, Dirichlet, LabelSkew, Partition
from offbeat.strategies.base import require_choice

Split = Literal["defdp", "seldp", "label-skew", "dirichlet"]
ENDINGS = (".npy", ".csv", ".json")


def read_labels(path: Path | None, digits: bool) -> Any:
    """The labels of a file or of the digits; ValueError unless one of both is asked for.

    .npy holds an array, .json a list, .csv one label per row in its last column. The first row is
    a heading if all others are integers and it is not.
    """
    if (path is None) != digits:
        raise ValueError("data takes either a file of labels or --digits")
    if path is None:
        from offbeat.data.digits import DIGITS

        return [int(digit) for digit in DIGITS]
    require_file(path, "give a .npy, .csv or .json file of labels")
    require_choice("ending of the file of labels", path.suffix, ENDINGS)
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
    split: Split,
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
