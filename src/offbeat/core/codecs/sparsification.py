"""Codecs that send some elements of a message: topk and randomk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from offbeat.core.codecs.codec import Array, Codec
from offbeat.core.rules.vocabulary import Setting

PLACE_BYTES = 4
SHARE = {"fraction": Setting("number", least=0, most=1, above=True)}


@dataclass(frozen=True)
class TopK(Codec):
    """Codec that sends the share `fraction` of a message with the largest magnitudes, at least one,
    and their indices.

    Source: Stich et al., Sparsified SGD with Memory, 2018.
    """

    fraction: float

    name: ClassVar[str] = "topk"
    settings: ClassVar[dict[str, Setting]] = SHARE
    example: ClassVar[dict[str, Any]] = {"fraction": 0.01}

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return kept_count(size, self.fraction) * (itemsize + PLACE_BYTES)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        found, count = np.zeros_like(x), kept_count(len(x), self.fraction)
        if count:
            places = np.abs(x).argsort()[-count:]
            found[places] = x[places]
        return found


@dataclass(frozen=True)
class RandomK(Codec):
    """Codec that sends one random element of each of `fraction * n` equally long runs.

    The indices are drawn anew in each iteration. All ranks draw the same indices, so no indices are
    sent, and the values are averaged by an all-reduce.

    Source: Stich et al., Sparsified SGD with Memory, 2018; runs: ours.
    """

    fraction: float

    name: ClassVar[str] = "randomk"
    settings: ClassVar[dict[str, Setting]] = SHARE
    example: ClassVar[dict[str, Any]] = {"fraction": 0.01}
    linear: ClassVar[bool] = True

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return kept_count(size, self.fraction) * itemsize

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        found, places = np.zeros_like(x), self.places(len(x), iteration)
        found[places] = x[places]
        return found

    def places(self, size: int, iteration: int) -> NDArray[np.int64]:
        """Return the indices of the elements that are sent in an iteration."""
        count = kept_count(size, self.fraction)
        edges = np.arange(count + 1) * size // max(count, 1)
        return np.random.default_rng((size, iteration)).integers(edges[:-1], edges[1:])


def kept_count(size: int, fraction: float) -> int:
    """Return the number of elements that are sent of a message with `size` elements."""
    return max(1, int(size * fraction)) if size else 0
