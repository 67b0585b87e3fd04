"""Base class of codecs, and their reference implementation in NumPy.

A codec encodes numbers as fewer bytes and decodes them with an error. The reference favours clarity
over speed; `tensor_codecs.code` returns the implementation on tensors. A codec is a frozen
dataclass of its settings. `register` in `__init__.py` adds it to the wires of plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan.semantics import shard_slice
from offbeat.core.rules.vocabulary import Setting

Array = NDArray[np.float64]
Memory = MutableMapping[str, Any]
"""State that a rank keeps between the messages of one transfer."""

BLOCK = 256  # elements that share a scale
LEAST_SCALE = 1e-30  # a smaller scale has no inverse in float32: its block is sent as zeros


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs.

    Attributes:
        name: name of the codec in the wires of a plan.
        settings: settings of the codec by name.
        example: usual values of the settings, with which the speed of the codec is measured.
        grain: the number of elements of every shard of a message is a multiple of this.
        linear: whether the mean of the codes is the code of the mean. If true, codes are averaged
            by an all-reduce; if false, every rank's codes are decoded.
        ways: exchanges of the codes that a codec supports which is not linear, the default first.
            Without `scatter`, no mean is encoded again.
        rounds: number of successive messages in one average.
        piecewise: whether a message may be encoded and decoded in parts of whole `pieces.PIECE`
            numbers, with the same result. Two ranks then send its first part while they encode the
            next one.
    """

    name: ClassVar[str]
    settings: ClassVar[dict[str, Setting]] = {}
    example: ClassVar[dict[str, Any]] = {}
    grain: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    ways: ClassVar[tuple[str, ...]] = ("gather", "scatter")
    rounds: ClassVar[int] = 1
    piecewise: ClassVar[bool] = False

    @abstractmethod
    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        """Return the bytes of the codes of `size` elements with `itemsize` bytes each."""

    @abstractmethod
    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        """Encode a flat array, decode the codes, and return the result as a new array."""

    def tensor_code(self) -> Any:
        """Return the implementation of this codec on tensors, a `tensor_codecs.Code`. It is called
        once per thread.

        Raises:
            TypeError: the codec has no implementation on tensors.
        """
        raise TypeError(
            f"codec ({self.name!r}) must have an implementation on tensors: define `tensor_code`"
        )

    def average(
        self,
        given: Sequence[Array],
        via: str = "gather",
        iteration: int = 0,
        memories: Sequence[Memory] | None = None,
    ) -> tuple[Array, list[Array]]:
        """Return the mean that every rank receives and the encoding error of each rank.

        Args:
            given: flat array of each rank, all of one length.
            via: `gather` sends all codes to all ranks. `scatter` sends the codes of shard k to
                rank k, which averages them and sends the mean encoded again.
            iteration: planned iteration; it seeds `RandomK`.
            memories: state of each rank. With `scatter`, rank k keeps the error of its second
                encoding there and adds it to its next mean.
        """
        if via == "scatter":
            return self._average_by_scatter(given, iteration, memories)
        arrived = [self.round_trip(x, iteration) for x in given]
        lost = [x - y for x, y in zip(given, arrived, strict=True)]
        return np.sum(arrived, axis=0) / len(given), lost

    def _average_by_scatter(
        self, given: Sequence[Array], iteration: int, memories: Sequence[Memory] | None
    ) -> tuple[Array, list[Array]]:
        mean, lost = np.empty_like(given[0]), [x.copy() for x in given]
        for k, shard in enumerate(shards(len(mean), len(given), self.grain)):
            part, errors = self.average([x[shard] for x in given], "gather", iteration)
            for all_lost, error in zip(lost, errors, strict=True):
                all_lost[shard] = error
            if memories is not None:
                part = part + memories[k].get("mean", 0.0)
            mean[shard] = self.round_trip(part, iteration)
            if memories is not None:
                memories[k]["mean"] = part - mean[shard]
        return mean, lost


@dataclass(frozen=True)
class Exact(Codec):
    """Codec without error, which `check` uses in place of every codec."""

    name: ClassVar[str] = "exact"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return size * itemsize

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return x.copy()


class CodeByRow:
    """Base of tensor implementations that add the codes of several ranks one after the other."""

    def add_all(self, codes: Any, out: Any) -> None:
        """Decode each row of a table of codes and add it to one tensor, in row order."""
        # One call for all rows could add several rows at one index. On a GPU the order of these
        # additions is not fixed, so the sums of the ranks would differ in their last bits.
        for row in codes:
            self.add(row, out)

    @abstractmethod
    def add(self, codes: Any, out: Any) -> None:
        """Decode codes and add them to `out`."""


def align(size: int, unit: int) -> int:
    """Return a number of bytes, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def shards(size: int, count: int, grain: int) -> list[slice]:
    """Cut `size` elements into `count` shards of equally many grains; the last may be shorter."""
    return [shard_slice(size, count, k, grain) for k in range(count)]


def scales_of(x: Array, peak: float) -> Array:
    """Return for each block of 256 the largest magnitude divided by `peak`, rounded to bf16."""
    starts = range(0, len(x), BLOCK)
    largest = [float(np.abs(x[a : a + BLOCK]).max()) for a in starts]
    return zero_tiny(to_bf16(np.array(largest) / peak))


def zero_tiny(scales: Array) -> Array:
    """Replace scales below `LEAST_SCALE` by 0."""
    return np.where(scales < LEAST_SCALE, 0.0, scales)


def round_to_scale(x: Array, most: int) -> Array:
    """Round to the nearest multiple of the block's scale, from -most to most times the scale."""
    scales = np.repeat(scales_of(x, most), BLOCK)[: len(x)]
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.clip(np.rint(x * inverse), -most, most) * scales


def to_bf16(x: Array) -> Array:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)
