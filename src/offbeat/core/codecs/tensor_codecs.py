"""Codecs on tensors: their protocol, bf16, fp16 and topk, and the table of all.

An implementation computes the same as `Codec.round_trip` does in NumPy, in few passes over memory.
It processes flat tensors in pieces that fit the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.core.codecs import BF16, FP16, Codec, Int4, Int8, Sign, TopK
from offbeat.core.codecs.blocks import Int4Code, Int8Code, SignCode
from offbeat.core.codecs.codec import CodeByRow
from offbeat.core.codecs.pieces import pieces
from offbeat.core.codecs.quantization import LARGEST
from offbeat.core.codecs.sparsification import PLACE_BYTES, kept_count


class Code(Protocol):
    """Implementation of a codec for float32 and float64 tensors. Codes are uint8 tensors.

    Numbers are a flat tensor `[n]` or a table `[rows, n]`; a table's codes are `[rows, bytes]`.
    """

    def encode(self, x: Tensor, codes: Tensor) -> None:
        """Encode a tensor or each row of a table into `codes`; replace x by the encoding error."""
        ...

    def add(self, codes: Tensor, out: Tensor) -> None:
        """Decode codes and add them to `out`; with tables, row by row."""
        ...

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        """Decode each row of a table of codes and add it to one tensor, in row order."""
        ...


class HalfCode:
    """Code with one bfloat16 or float16 per number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: Tensor, codes: Tensor) -> None:
        halves = codes.view(self._dtype)
        for piece in pieces(x):
            one, to = x[..., piece], halves[..., piece]
            if self._dtype == torch.float16:
                to.copy_(one.clamp(-LARGEST, LARGEST))
            else:
                to.copy_(one)
            one -= to

    def add(self, codes: Tensor, out: Tensor) -> None:
        halves = codes.view(self._dtype)
        for piece in pieces(out):
            out[..., piece].add_(halves[..., piece])

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        for piece in pieces(out):
            for row in codes.view(self._dtype):
                out[piece].add_(row[piece])


class TopKCode(CodeByRow):
    """Code with the elements of largest magnitude and their indices: all values, then all
    indices."""

    def __init__(self, codec: TopK) -> None:
        self._fraction = codec.fraction

    def encode(self, x: Tensor, codes: Tensor) -> None:
        count = kept_count(x.shape[-1], self._fraction)
        if count == 0:
            return
        places = x.abs().topk(count, sorted=False).indices
        values, where = self._parts(codes, x.dtype)
        values.copy_(x.gather(-1, places))
        where.copy_(places)
        x.scatter_(-1, places, 0.0)

    def add(self, codes: Tensor, out: Tensor) -> None:
        values, where = self._parts(codes, out.dtype)
        out.scatter_add_(-1, where.long(), values)

    @staticmethod
    def _parts(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = codes.shape[-1] // (dtype.itemsize + PLACE_BYTES)
        edge = count * dtype.itemsize
        return codes[..., :edge].view(dtype), codes[..., edge:].view(torch.int32)


_CODES: dict[type[Codec], Callable[[Any], Code]] = {
    BF16: lambda _: HalfCode(torch.bfloat16),
    FP16: lambda _: HalfCode(torch.float16),
    Int8: lambda _: Int8Code(),
    Int4: lambda _: Int4Code(),
    Sign: lambda _: SignCode(),
    TopK: TopKCode,
}


_mine = threading.local()


def code(codec: Codec) -> Code:
    """Return this thread's tensor implementation of a codec that is not linear."""
    known: dict[Codec, Code] = _mine.__dict__.setdefault("codes", {})
    if codec not in known:
        make = _CODES.get(type(codec))
        known[codec] = codec.tensor_code() if make is None else make(codec)
    return known[codec]
