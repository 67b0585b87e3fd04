"""What a codec is: numbers in, fewer bytes on the link, about the same numbers out.

Here is the meaning, in NumPy, slow and readable; `transport/codes` does the same on tensors. A
codec is a frozen dataclass of its settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from offbeat.core.rules.vocabulary import Setting

Array = NDArray[np.float64]
Memory = MutableMapping[str, Any]
"""What a rank keeps from one message of a transfer to the next."""

BLOCK = 256  # elements that share a scale
LEAST_SCALE = 1e-30  # smaller ones have no inverse in float32; such a block is sent as zeros


@dataclass(frozen=True)
class Codec(ABC):
    """One codec with its settings.

    `grain`: shards of a message are multiples of so many elements. A `linear` one averages its
    codes as they are, in an all-reduce, instead of decoding those of all ranks. `rounds`: messages
    that follow each other in one average.
    """

    name: ClassVar[str]
    settings: ClassVar[dict[str, Setting]] = {}
    grain: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    rounds: ClassVar[int] = 1

    @abstractmethod
    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        """Bytes of the codes of so many elements."""

    @abstractmethod
    def arrives(self, x: Array, iteration: int = 0) -> Array:
        """What is decoded of the codes of a flat array; a new array."""

    def average(
        self,
        given: Sequence[Array],
        via: str = "gather",
        iteration: int = 0,
        memories: Sequence[Memory] | None = None,
    ) -> tuple[Array, list[Array]]:
        """The mean that arrives on every rank, and what each rank's codes have lost.

        `gather`: all ranks get all codes. `scatter`: rank k gets the codes of shard k, averages
        them, and sends that in codes again; what those lose is added to its next mean.
        """
        if via == "scatter":
            return self._scattered(given, iteration, memories)
        arrived = [self.arrives(x, iteration) for x in given]
        lost = [x - y for x, y in zip(given, arrived, strict=True)]
        return np.sum(arrived, axis=0) / len(given), lost

    def _scattered(
        self, given: Sequence[Array], iteration: int, memories: Sequence[Memory] | None
    ) -> tuple[Array, list[Array]]:
        mean, lost = np.empty_like(given[0]), [x.copy() for x in given]
        for k, shard in enumerate(shards(len(mean), len(given), self.grain)):
            part, errors = self.average([x[shard] for x in given], "gather", iteration)
            for all_lost, error in zip(lost, errors, strict=True):
                all_lost[shard] = error
            if memories is not None:
                part = part + memories[k].get("mean", 0.0)
            mean[shard] = self.arrives(part, iteration)
            if memories is not None:
                memories[k]["mean"] = part - mean[shard]
        return mean, lost


@dataclass(frozen=True)
class Exact(Codec):
    """Everything arrives as it is: what `check` takes for every codec."""

    name: ClassVar[str] = "exact"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return size * itemsize

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        return x.copy()


def shards(size: int, count: int, grain: int) -> list[slice]:
    """So many shards, each of as many whole grains; the last ones shorter or empty."""
    each = -(-size // (grain * count)) * grain
    return [slice(min(size, k * each), min(size, (k + 1) * each)) for k in range(count)]


def blocks(size: int) -> int:
    """Blocks of so many elements, the last one filled up."""
    return -(-size // BLOCK)


def scales_of(x: Array, peak: float) -> Array:
    """Per block of 256 the largest magnitude over `peak`, rounded to bf16."""
    starts = range(0, len(x), BLOCK)
    largest = [float(np.abs(x[a : a + BLOCK]).max()) for a in starts]
    return usable(to_bf16(np.array(largest) / peak))


def usable(scales: Array) -> Array:
    """Zero in place of those that are too small to divide by."""
    return np.where(scales < LEAST_SCALE, 0.0, scales)


def rounded(x: Array, most: int) -> Array:
    """Blocks in whole multiples of their scales, from -most to most, to the nearest."""
    scales = np.repeat(scales_of(x, most), BLOCK)[: len(x)]
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.clip(np.rint(x * inverse), -most, most) * scales


def to_bf16(x: Array) -> Array:
    """The nearest numbers of 16 bits with the exponents of float32, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)
