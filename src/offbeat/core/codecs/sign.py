"""sign: one bit per number, and the mean magnitude of its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import BLOCK, Array, Codec, blocks, to_bf16


@dataclass(frozen=True)
class Sign(Codec):
    """Plus or minus the mean magnitude of each block of 256, which travels as bf16.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    """

    name: ClassVar[str] = "sign"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return blocks(size) * (BLOCK // 8 + 2)

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        means = [float(np.abs(x[a : a + BLOCK]).mean()) for a in range(0, len(x), BLOCK)]
        scales = np.repeat(to_bf16(np.array(means)), BLOCK)[: len(x)]
        return np.where(x >= 0, scales, -scales)
