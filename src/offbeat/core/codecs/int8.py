"""int8: blocks of 256 numbers in 8 bits each, with one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import BLOCK, Array, Codec, blocks, rounded

MOST = 127


@dataclass(frozen=True)
class Int8(Codec):
    """Multiples from -127 to 127 of a block's largest magnitude over 127, which travels as bf16."""

    name: ClassVar[str] = "int8"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return blocks(size) * (BLOCK + 2)

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        return rounded(x, MOST)
