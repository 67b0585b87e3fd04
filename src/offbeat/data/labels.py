"""Classes of a data set, and the samples of each class."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHOWN = 5  # largest number of empty classes in an error message


class Classes(NamedTuple):
    """Classes of a data set. `codes[i]` is the class of sample i, an index of `names`."""

    names: tuple[str, ...]
    codes: NDArray[np.int64]

    def members(self) -> list[NDArray[np.int64]]:
        """Return the samples of each class in ascending order."""
        ends = np.cumsum(np.bincount(self.codes, minlength=len(self.names)))
        return np.split(np.argsort(self.codes, kind="stable"), ends[:-1])


def classes_of(labels: Any) -> Classes:
    """Return the classes of a list, array or tensor of labels.

    Integer labels are the classes 0, 1, .. up to the largest; each must have a sample. Text labels
    are classes in alphabetical order. Raise ValueError for other labels.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"labels (shape {array.shape}) must be one class per sample; "
            "give a list with a label of each"
        )
    if array.dtype.kind in "US":
        names, codes = np.unique(array, return_inverse=True)
        return Classes(tuple(map(str, names)), codes.astype(np.int64))
    if array.dtype.kind not in "iu":
        odd = "NaN among them" if array.dtype.kind == "f" and np.isnan(array).any() else "as given"
        raise ValueError(
            f"labels (of type {array.dtype}, {odd}) must be integers or texts; convert them first"
        )
    return _integer_classes(array.astype(np.int64))


def _integer_classes(codes: NDArray[np.int64]) -> Classes:
    if codes.min() < 0:
        raise ValueError(
            f"labels (smallest {codes.min()}) must not be below 0; leave out samples without class"
        )
    if codes.max() >= len(codes):  # tested before counting, which needs memory for each class
        raise ValueError(
            f"labels (largest {codes.max()}) must be below the number of samples ({len(codes)}), "
            "as no class may be empty; number the classes with np.unique(labels, "
            "return_inverse=True)[1]"
        )
    empty = np.flatnonzero(np.bincount(codes) == 0)
    if len(empty):
        shown = ", ".join(map(str, empty[:SHOWN])) + (", .." if len(empty) > SHOWN else "")
        raise ValueError(
            f"labels (0 to {codes.max()}) must have a sample of every class, but class {shown} is "
            "empty; number the classes with np.unique(labels, return_inverse=True)[1]"
        )
    return Classes(tuple(map(str, range(int(codes.max()) + 1))), codes)
