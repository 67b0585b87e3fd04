"""Partition of the samples of a data set among workers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.files import write_text
from offbeat.data.labels import classes_of

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample numbers of each worker. Every sample has at most one owner, and every worker has a
    sample.

    Attributes:
        shares: sample numbers of each worker, one array per worker.
        split: description of the method by which the partition was made.
    """

    shares: tuple[NDArray[np.int64], ...]
    split: str = "given"

    def __post_init__(self) -> None:
        shares = tuple(_share(n, share) for n, share in enumerate(self.shares))
        object.__setattr__(self, "shares", shares)
        if not shares:
            raise ValueError("shares (none) must be at least one; give one per worker")
        owners = np.bincount(np.concatenate(shares))
        if owners.max() > 1:
            twice = int(owners.argmax())
            raise ValueError(
                f"sample {twice} must have one owner, not {owners[twice]}; leave it in one share"
            )

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return len(self.shares)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples of each worker, the weights of a federated average."""
        return tuple(map(len, self.shares))

    @property
    def samples(self) -> int:
        """Return the number of samples of all workers."""
        return sum(self.sizes)

    def histogram(self, labels: Any) -> NDArray[np.int64]:
        """Return the number of samples by worker and class, [workers, classes].

        Args:
            labels: class of each sample, as `LabelSkew.partition` accepts them.
        """
        names, codes = classes_of(labels)
        last = max(int(share.max()) for share in self.shares)
        if last >= len(codes):
            raise ValueError(
                f"labels ({len(codes)}) must cover every sample up to number {last}; "
                "give the labels of the data that was split"
            )
        return np.stack([np.bincount(codes[s], minlength=len(names)) for s in self.shares])

    @cached_property
    def digest(self) -> int:
        """Return a checksum (CRC-32) of the shares."""
        value = 0
        for share in self.shares:
            value = zlib.crc32(share.tobytes(), zlib.crc32(len(share).to_bytes(8, "little"), value))
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return the partition as JSON data."""
        shares = [share.tolist() for share in self.shares]
        return {"schema": SCHEMA, "split": self.split, "shares": shares}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Partition:
        """Return the partition that a result of `to_dict` describes.

        Args:
            data: partition as JSON data.

        Raises:
            ValueError: the data is not a partition.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA or "shares" not in data:
            raise ValueError(
                f"a partition must have schema {SCHEMA} and shares; write it with Partition.save"
            )
        shares = data["shares"]
        if not isinstance(shares, Sequence):
            raise ValueError(f"shares ({shares!r}) must be a list with the samples of each worker")
        return cls(tuple(map(np.asarray, shares)), str(data.get("split", "given")))

    def save(self, path: str | Path) -> None:
        """Write the partition to a JSON file.

        Args:
            path: file to write.
        """
        write_text(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read a partition from a JSON file.

        Args:
            path: file that `save` has written.

        Raises:
            ValueError: the file is not a partition; the message names the file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _share(worker: int, share: Any) -> NDArray[np.int64]:
    """Return a read-only array of sample numbers. Raise ValueError if the values are invalid."""
    array = np.array(share)
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"share of worker {worker} (shape {array.shape}) must be a list of at least one "
            "sample number; give it a sample or leave the worker out"
        )
    if array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(f"share of worker {worker} must hold sample numbers, 0 or above")
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array
