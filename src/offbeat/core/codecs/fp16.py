"""fp16: half of the bytes of float32, four decimal digits, numbers up to 65,504."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec

LARGEST = 65504.0  # beyond it is infinity; what is cut off goes with the next message


@dataclass(frozen=True)
class FP16(Codec):
    """Every number rounded to 16 bits with 5 of exponent; larger ones become the largest."""

    name: ClassVar[str] = "fp16"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return 2 * size

    def arrives(self, x: Array, iteration: int = 0) -> Array:
        single = np.clip(x, -LARGEST, LARGEST).astype(np.float32)  # as tensors are converted
        return single.astype(np.float16).astype(np.float64)
