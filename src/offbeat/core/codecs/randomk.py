"""Random-k sparsification: entries at places that all ranks draw alike, so only values travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from offbeat.core.codecs.codec import Array, Codec
from offbeat.core.codecs.topk import kept
from offbeat.core.rules.vocabulary import Setting


@dataclass(frozen=True)
class RandomK(Codec):
    """One entry of each of `fraction n` runs that are equally long, drawn anew in every iteration.

    As all ranks send the same places, their values are averaged as they are.
    Source: Stich et al., Sparsified SGD with Memory, 2018; runs: ours.
    """

    fraction: float

    name: ClassVar[str] = "randomk"
    settings: ClassVar[dict[str, Setting]] = {
        "fraction": Setting("number", least=0, most=1, above=True)
    }
    linear: ClassVar[bool] = True

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return kept(size, self.fraction) * itemsize

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        found, places = np.zeros_like(x), self.places(len(x), iteration)
        found[places] = x[places]
        return found

    def places(self, size: int, iteration: int) -> NDArray[np.int64]:
        """Where the entries are that travel in an iteration."""
        count = kept(size, self.fraction)
        edges = np.arange(count + 1) * size // max(count, 1)
        return np.random.default_rng((size, iteration)).integers(edges[:-1], edges[1:])
