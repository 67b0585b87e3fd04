"""Codec fp16: half the bytes of float32, about four decimal digits, magnitudes up to 65,504."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, Codec

LARGEST = 65504.0  # larger numbers are clamped; the next message carries the difference


@dataclass(frozen=True)
class FP16(Codec):
    """Codec that clamps every number to `LARGEST` and rounds it to float16 (5 exponent bits)."""

    name: ClassVar[str] = "fp16"

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return 2 * size

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        single = np.clip(x, -LARGEST, LARGEST).astype(np.float32)  # same conversion as on tensors
        return single.astype(np.float16).astype(np.float64)
