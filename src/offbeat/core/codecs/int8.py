"""Codec int8: 8 bits per number and one scale per block of 256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import BLOCK, Array, Codec, block_count, round_to_scale

MOST = 127


@dataclass(frozen=True)
class Int8(Codec):
    """Codec that sends multiples from -127 to 127 of a scale per block.

    The scale is the block's largest magnitude divided by 127, sent as bf16.
    """

    name: ClassVar[str] = "int8"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return block_count(size) * (BLOCK + 2)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return round_to_scale(x, MOST)
