"""Codec sign: one bit per number and one mean magnitude per block of 256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import BLOCK, Array, Codec, block_count, to_bf16


@dataclass(frozen=True)
class Sign(Codec):
    """Codec that replaces each number by its sign times the mean magnitude of its block.

    The mean magnitude is sent as bf16.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    """

    name: ClassVar[str] = "sign"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return block_count(size) * (BLOCK // 8 + 2)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        means = [float(np.abs(x[a : a + BLOCK]).mean()) for a in range(0, len(x), BLOCK)]
        scales = np.repeat(to_bf16(np.array(means)), BLOCK)[: len(x)]
        return np.where(x >= 0, scales, -scales)
