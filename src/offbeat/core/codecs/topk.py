"""Codec top-k: the elements of largest magnitude and their indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec
from offbeat.core.rules.vocabulary import Setting

PLACE_BYTES = 4


@dataclass(frozen=True)
class TopK(Codec):
    """Codec that sends the share `fraction` of a message with the largest magnitudes, at least one.

    Source: Stich et al., Sparsified SGD with Memory, 2018.
    """

    fraction: float

    name: ClassVar[str] = "topk"
    settings: ClassVar[dict[str, Setting]] = {
        "fraction": Setting("number", least=0, most=1, above=True)
    }

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return kept_count(size, self.fraction) * (itemsize + PLACE_BYTES)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        found, count = np.zeros_like(x), kept_count(len(x), self.fraction)
        if count:
            places = np.abs(x).argsort()[-count:]
            found[places] = x[places]
        return found


def kept_count(size: int, fraction: float) -> int:
    """Return the number of elements that are sent of a message with `size` elements."""
    return max(1, int(size * fraction)) if size else 0
