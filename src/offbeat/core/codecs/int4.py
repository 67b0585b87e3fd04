"""Codec int4: 4 bits per number and one scale per block of 256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import BLOCK, Array, Codec, block_count, round_to_scale

MOST = 7


@dataclass(frozen=True)
class Int4(Codec):
    """Codec that sends multiples from -7 to 7 of a scale per block.

    The scale is the block's largest magnitude divided by 7, sent as bf16.
    """

    name: ClassVar[str] = "int4"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return block_count(size) * (BLOCK // 2 + 2)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return round_to_scale(x, MOST)
