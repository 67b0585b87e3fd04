"""Codec bf16: half the bytes of float32, the same range, about three decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.codec import Array, Codec, to_bf16


@dataclass(frozen=True)
class BF16(Codec):
    """Codec that rounds every number to bfloat16 (8 exponent bits)."""

    name: ClassVar[str] = "bf16"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return 2 * size

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return to_bf16(x)
