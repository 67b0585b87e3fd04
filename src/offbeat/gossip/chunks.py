"""Division of flat tensors into chunks for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.core.codecs import Codec

CHUNK_BYTES = 512 << 10

WireForm = Literal["none", "bf16"]
"""Form of numbers in a transfer without codec: unchanged, or rounded to bfloat16."""


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of the flat tensor with index `flat`."""

    flat: int
    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


class Wire:
    """Form in which flat tensors are sent: chunks, and buffers on the host.

    With a codec, transfers contain codes of changes. The buffers then hold numbers of at least 32
    bits.

    Attributes:
        codec: codec of the changes; None if numbers are sent without codes.
        dtypes: data type of each flat tensor in a buffer.
        keeps_differences: whether a buffer can hold differences of its numbers, and no anchors are
            needed.
        sizes: number of elements of each flat tensor.
        chunks: all chunks, in the order in which they are sent.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        form: WireForm = "none",
        chunk_bytes: int = CHUNK_BYTES,
        codec: Codec | None = None,
    ):
        self.codec = codec
        self.dtypes = [_wide_dtype(flat) if codec else _wire_dtype(flat, form) for flat in flats]
        grain = codec.grain if codec else 1
        self.keeps_differences = codec is None and all(d.itemsize > 2 for d in self.dtypes)
        self.sizes = [flat.numel() for flat in flats]
        self.chunks: list[Chunk] = []
        for number, (dtype, size) in enumerate(zip(self.dtypes, self.sizes, strict=True)):
            step = max(1, chunk_bytes // dtype.itemsize // grain) * grain
            self.chunks += [
                Chunk(number, start, min(start + step, size)) for start in range(0, size, step)
            ]

    def buffers(self) -> list[Tensor]:
        """Allocate buffers on the host, one for each flat tensor."""
        return [
            torch.empty(size, dtype=dtype, device="cpu")
            for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def view(self, buffers: Sequence[Tensor], number: int) -> Tensor:
        """Return one chunk in the buffers."""
        chunk = self.chunks[number]
        return buffers[chunk.flat][chunk.span]

    def memory(self, buffers: Sequence[Tensor], number: int) -> memoryview:
        """Return the bytes of one chunk in the buffers."""
        return memory_of(self.view(buffers, number))

    def codes(self) -> list[Tensor]:
        """Allocate buffers for the codes of each chunk."""
        return [
            torch.empty(self._code_bytes(chunk), dtype=torch.uint8, device="cpu")
            for chunk in self.chunks
        ]

    @property
    def bytes(self) -> int:
        """Return the bytes of all chunks, encoded if there is a codec."""
        if self.codec is None:
            return self.plain_bytes
        return sum(self._code_bytes(chunk) for chunk in self.chunks)

    @property
    def plain_bytes(self) -> int:
        """Return the bytes of all chunks without encoding."""
        return sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))

    def _code_bytes(self, chunk: Chunk) -> int:
        assert self.codec is not None
        return self.codec.bytes_of(chunk.stop - chunk.start, self.dtypes[chunk.flat].itemsize)


def _wide_dtype(flat: Tensor) -> torch.dtype:
    return flat.dtype if flat.dtype.itemsize > 2 else torch.float32


def _wire_dtype(flat: Tensor, form: WireForm) -> torch.dtype:
    return torch.bfloat16 if form == "bf16" and flat.dtype.itemsize > 2 else flat.dtype
