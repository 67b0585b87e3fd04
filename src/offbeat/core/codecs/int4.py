"""int4: blocks of 256 numbers in 4 bits each, with one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import BLOCK, Array, Codec, blocks, rounded

MOST = 7


@dataclass(frozen=True)
class Int4(Codec):
    """Multiples from -7 to 7 of a block's largest magnitude over 7, which travels as bf16."""

    name: ClassVar[str] = "int4"
    grain: ClassVar[int] = BLOCK

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return blocks(size) * (BLOCK // 2 + 2)

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        return rounded(x, MOST)
