"""Chunks: flat tensors cut into the pieces in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.storage.flat import memory_of

CHUNK_BYTES = 512 << 10

WireForm = Literal["none", "bf16"]
"""What numbers travel as: themselves, or rounded to bfloat16."""


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of one of the flat tensors."""

    flat: int
    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


class Wire:
    """How flat tensors travel: their chunks, and buffers on the host."""

    def __init__(
        self, flats: Sequence[Tensor], form: WireForm = "none", chunk_bytes: int = CHUNK_BYTES
    ):
        self.dtypes = [_dtype(flat, form) for flat in flats]
        self.sizes = [flat.numel() for flat in flats]
        self.chunks: list[Chunk] = []
        for number, (dtype, size) in enumerate(zip(self.dtypes, self.sizes, strict=True)):
            step = max(1, chunk_bytes // dtype.itemsize)
            self.chunks += [
                Chunk(number, start, min(start + step, size)) for start in range(0, size, step)
            ]

    def buffers(self) -> list[Tensor]:
        """New ones, on the host."""
        return [
            torch.empty(size, dtype=dtype)
            for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def memory(self, buffers: Sequence[Tensor], number: int) -> memoryview:
        """The bytes of one chunk."""
        chunk = self.chunks[number]
        return memory_of(buffers[chunk.flat][chunk.span])

    @property
    def bytes(self) -> int:
        """Of all chunks."""
        return sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))


def _dtype(flat: Tensor, form: WireForm) -> torch.dtype:
    return torch.bfloat16 if form == "bf16" and flat.dtype.itemsize > 2 else flat.dtype
