"""Top-k sparsification: only the largest entries travel, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec
from offbeat.core.rules.vocabulary import Setting

PLACE_BYTES = 4


@dataclass(frozen=True)
class TopK(Codec):
    """The largest share `fraction` of a message by magnitude, at least one entry.

    Source: Stich et al., Sparsified SGD with Memory, 2018.
    """

    fraction: float

    name: ClassVar[str] = "topk"
    settings: ClassVar[dict[str, Setting]] = {
        "fraction": Setting("number", least=0, most=1, above=True)
    }

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return kept(size, self.fraction) * (itemsize + PLACE_BYTES)

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        found, count = np.zeros_like(x), kept(len(x), self.fraction)
        if count:
            places = np.abs(x).argsort()[-count:]
            found[places] = x[places]
        return found


def kept(size: int, fraction: float) -> int:
    """How many of so many entries travel."""
    return max(1, int(size * fraction)) if size else 0
