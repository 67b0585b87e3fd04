"""Codec that sends the largest elements of each chunk, in two bits each (SparseLoCo)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, CodeByRow, Codec, align, to_bf16
from offbeat.core.codecs.sparsification import SHARE, kept_count
from offbeat.core.rules.vocabulary import Setting

CHUNK = 4096  # elements of a chunk: an index takes 12 bits
LEVEL_BYTES = 4  # two magnitudes in bf16 per chunk
ALIGNED = 4  # codes of any size are a multiple of this, so that rows of codes have views as bf16


@dataclass(frozen=True)
class TopK2(Codec):
    """Codec that sends the share `fraction` of each chunk of 4096 elements: indices of 12 bits, and
    values of two bits.

    A value is a sign and one of two magnitudes of its chunk: the mean magnitude of the sent
    elements that are at most as large as the mean of all sent ones, and that of the larger ones. If
    an element that is sent is zero, the first magnitude is zero.

    Source: Sarfi et al., SparseLoCo, 2025, Section 3: chunks, 2 bits. The paper does not fix the
    levels; the reference code takes the mean of each of four bins.
    """

    fraction: float

    name: ClassVar[str] = "topk2"
    settings: ClassVar[dict[str, Setting]] = SHARE
    example: ClassVar[dict[str, Any]] = {"fraction": 0.0156}
    # A mean has many equal magnitudes, so the largest of them would be arbitrary.
    ways: ClassVar[tuple[str, ...]] = ("gather",)

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return align(self.used_bytes(size), ALIGNED)

    def used_bytes(self, size: int) -> int:
        """Return the bytes of the codes without the gap behind them."""
        return sum(LEVEL_BYTES + index_bytes(k) + -(-k // 4) for k in self.counts(size))

    def counts(self, size: int) -> list[int]:
        """Return the number of elements that are sent of each chunk."""
        return [kept_count(n, self.fraction) for n in chunk_sizes(size)]

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        found = np.zeros_like(x)
        for at, k in zip(range(0, len(x), CHUNK), self.counts(len(x)), strict=True):
            chunk = x[at : at + CHUNK]
            places = np.abs(chunk).argsort()[-k:]
            found[at + places] = quantize(chunk[places])
        return found

    def tensor_code(self) -> Any:
        return TopK2Code(self)


def quantize(values: Array) -> Array:
    """Return values of two bits each: a sign and one of two magnitudes."""
    sizes = np.abs(values)
    limit = sizes.mean() if sizes.min() > 0 else 0.0
    large = sizes > limit
    low, high = (sizes[which].mean() if which.any() else 0.0 for which in (~large, large))
    return np.where(large, *to_bf16(np.array([[high], [low]]))) * np.where(values < 0, -1.0, 1.0)


def chunk_sizes(size: int) -> list[int]:
    """Return the elements of each chunk; the last one may be shorter."""
    return [min(CHUNK, size - at) for at in range(0, size, CHUNK)]


def index_bytes(count: int) -> int:
    """Return the bytes of `count` indices of 12 bits; two share three bytes."""
    return -(-count // 2) * 3


class TopK2Code(CodeByRow):
    """TopK2 on tensors. Codes: the magnitudes of all chunks, all indices, all values."""

    def __init__(self, codec: TopK2) -> None:
        self._codec = codec

    def encode(self, x: Any, codes: Any) -> None:
        for chunks, levels, indices, bits in self._groups(x, codes):
            k = self._codec.counts(chunks.shape[-1])[0]
            places = chunks.abs().topk(k, sorted=False).indices
            values = chunks.gather(-1, places)
            sizes = values.abs()
            limit = sizes.mean(-1, keepdim=True)
            limit = limit * (sizes.amin(-1, keepdim=True) > 0)
            large = sizes > limit
            for column, which in ((0, ~large), (1, large)):
                count = which.sum(-1).clamp(min=1)
                levels[..., column] = (sizes * which).sum(-1) / count
            negative = values < 0
            pack_indices(places, indices)
            pack_bits(negative.to(places.dtype) + 2 * large.to(places.dtype), bits)
            sent = self._values(levels, negative, large, chunks)
            chunks.scatter_add_(-1, places, -sent)
        codes[..., self._codec.used_bytes(x.shape[-1]) :] = 0

    def add(self, codes: Any, out: Any) -> None:
        for chunks, levels, indices, bits in self._groups(out, codes):
            k = self._codec.counts(chunks.shape[-1])[0]
            places, values = unpack_indices(indices, k), unpack_bits(bits, k)
            sent = self._values(levels, (values & 1).bool(), values >= 2, chunks)
            chunks.scatter_add_(-1, places, sent)

    @staticmethod
    def _values(levels: Any, negative: Any, large: Any, like: Any) -> Any:
        low, high = (levels[..., column : column + 1].to(like.dtype) for column in (0, 1))
        return (low + (high - low) * large) * (1 - 2 * negative.to(like.dtype))

    def _groups(self, x: Any, codes: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield the full chunks, then the last one: elements `[..., chunks, elements]`, and their
        magnitudes, indices and values in the codes."""
        size = x.shape[-1]
        full, rest = divmod(size, CHUNK)
        counts = self._codec.counts(size)
        halves = codes[..., : align(LEVEL_BYTES * len(counts), ALIGNED)].view(_bf16(x))
        at = LEVEL_BYTES * len(counts)
        behind = at + sum(map(index_bytes, counts))
        for first, chunks, length in ((0, full, CHUNK), (full, 1, rest)):
            if not chunks or not length:
                continue
            k = counts[first]
            one, bit = index_bytes(k), -(-k // 4)
            elements = x[..., first * CHUNK : first * CHUNK + chunks * length]
            yield (
                elements.unflatten(-1, (chunks, length)),
                halves[..., 2 * first : 2 * (first + chunks)].unflatten(-1, (chunks, 2)),
                codes[..., at : at + chunks * one].unflatten(-1, (chunks, one)),
                codes[..., behind : behind + chunks * bit].unflatten(-1, (chunks, bit)),
            )
            at, behind = at + chunks * one, behind + chunks * bit


def pack_indices(places: Any, codes: Any) -> None:
    """Write indices below 4096 as 12 bits each; two share three bytes."""
    if places.shape[-1] % 2:
        places = _pad(places, 1)
    a, b = places[..., ::2], places[..., 1::2]
    codes[..., ::3] = a & 255
    codes[..., 1::3] = (a >> 8) | ((b & 15) << 4)
    codes[..., 2::3] = b >> 4


def unpack_indices(codes: Any, count: int) -> Any:
    """Return `count` indices of 12 bits as int64."""
    first, both, last = (codes[..., k::3].long() for k in range(3))
    pairs = first | ((both & 15) << 8), (both >> 4) | (last << 4)
    return _interleave(pairs)[..., :count]


def pack_bits(values: Any, codes: Any) -> None:
    """Write values from 0 to 3 as two bits each; four share a byte."""
    values = _pad(values, -values.shape[-1] % 4)
    a, b, c, d = (values[..., k::4] for k in range(4))
    codes[...] = a | (b << 2) | (c << 4) | (d << 6)


def unpack_bits(codes: Any, count: int) -> Any:
    """Return `count` values from 0 to 3 as int64."""
    whole = codes.long()
    return _interleave([(whole >> 2 * k) & 3 for k in range(4)])[..., :count]


def _interleave(columns: Any) -> Any:
    """Return the elements of the tensors in turn: the first ones, then the second ones."""
    first = columns[0]
    out = first.new_empty((*first.shape, len(columns)))
    for k, column in enumerate(columns):
        out[..., k] = column
    return out.flatten(-2)


def _pad(x: Any, count: int) -> Any:
    """Return a tensor with `count` zeros behind its last dimension."""
    out = x.new_zeros((*x.shape[:-1], x.shape[-1] + count))
    out[..., : x.shape[-1]] = x
    return out


def _bf16(x: Any) -> Any:
    """Return torch's bfloat16, without an import of torch: planning works without it."""
    return x.new_empty(0).bfloat16().dtype
