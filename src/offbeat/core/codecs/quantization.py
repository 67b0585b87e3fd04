"""Codecs with a fixed number of bits per number: bf16, fp16, int8, int4 and sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.core.codecs.codec import BLOCK, Array, Codec, round_to_scale, to_bf16

LARGEST = 65504.0  # fp16 clamps larger numbers; the next message carries the difference


class HalfCodec(Codec):
    """Base of codecs that send two bytes per number."""

    piecewise: ClassVar[bool] = True

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return 2 * size


@dataclass(frozen=True)
class BF16(HalfCodec):
    """Codec that rounds every number to bfloat16 (8 exponent bits): the range of float32, about
    three decimal digits."""

    name: ClassVar[str] = "bf16"

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return to_bf16(x)


@dataclass(frozen=True)
class FP16(HalfCodec):
    """Codec that clamps every number to `LARGEST` and rounds it to float16 (5 exponent bits, about
    four decimal digits)."""

    name: ClassVar[str] = "fp16"

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        single = np.clip(x, -LARGEST, LARGEST).astype(np.float32)  # same conversion as on tensors
        return single.astype(np.float16).astype(np.float64)


class BlockCodec(Codec):
    """Base of codecs that send one scale in bf16 per block of 256 numbers.

    Attributes:
        width: bytes of one block's quantized numbers.
    """

    grain: ClassVar[int] = BLOCK
    piecewise: ClassVar[bool] = True
    width: ClassVar[int]

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return -(-size // BLOCK) * (self.width + 2)


class MultipleCodec(BlockCodec):
    """Base of codecs that send multiples from -most to most of the scale, which is the block's
    largest magnitude divided by most."""

    most: ClassVar[int]

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        return round_to_scale(x, self.most)


@dataclass(frozen=True)
class Int8(MultipleCodec):
    """Codec that sends multiples from -127 to 127 of a scale per block."""

    name: ClassVar[str] = "int8"
    width: ClassVar[int] = BLOCK
    most: ClassVar[int] = 127


@dataclass(frozen=True)
class Int4(MultipleCodec):
    """Codec that sends multiples from -7 to 7 of a scale per block."""

    name: ClassVar[str] = "int4"
    width: ClassVar[int] = BLOCK // 2
    most: ClassVar[int] = 7


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Codec that replaces each number by its sign times the mean magnitude of its block.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019.
    """

    name: ClassVar[str] = "sign"
    width: ClassVar[int] = BLOCK // 8

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        means = [float(np.abs(x[a : a + BLOCK]).mean()) for a in range(0, len(x), BLOCK)]
        scales = np.repeat(to_bf16(np.array(means)), BLOCK)[: len(x)]
        return np.where(x >= 0, scales, -scales)
