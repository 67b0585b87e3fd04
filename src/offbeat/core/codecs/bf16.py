"""bf16: half of the bytes of float32, its range, three decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import Array, Codec, to_bf16


@dataclass(frozen=True)
class BF16(Codec):
    """Every number rounded to 16 bits with 8 of exponent."""

    name: ClassVar[str] = "bf16"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return 2 * size

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        return to_bf16(x)
