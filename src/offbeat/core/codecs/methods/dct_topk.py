"""Codec that sends the largest coefficients of a cosine transform of each chunk (DeMo)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Any, ClassVar

import numpy as np

from offbeat.core.codecs.codec import Array, CodeByRow, Codec, align
from offbeat.core.codecs.methods.chunked_topk import index_bytes, pack_indices, unpack_indices
from offbeat.core.codecs.sparsification import SHARE, kept_count
from offbeat.core.rules.vocabulary import Setting

SIDE = 64  # rows and columns of a chunk
CHUNK = SIDE * SIDE


@dataclass(frozen=True)
class DCTTopK(Codec):
    """Codec that sends the share `fraction` of the coefficients of each chunk with the largest
    magnitudes: indices of 12 bits, and values in the precision of the message.

    A chunk is 64 x 64 neighbouring elements of the message, row by row. Its coefficients are those
    of the orthonormal cosine transform (DCT-II) of rows and columns. The last chunk has as few rows
    as it needs, the last of them with zeros behind the message.

    Source: Peng, Quesnelle and Kingma, DeMo, 2024, Section 3.2. The reference code cuts each tensor
    along its own axes; here chunks follow the memory of the message, which holds several tensors.
    """

    fraction: float

    name: ClassVar[str] = "dct-topk"
    settings: ClassVar[dict[str, Setting]] = SHARE
    example: ClassVar[dict[str, Any]] = {"fraction": 0.0078}
    ways: ClassVar[tuple[str, ...]] = ("gather",)  # as the method averages

    def bytes_of(self, size: int, itemsize: int = 4) -> int:
        return align(self.used_bytes(size, itemsize), itemsize)

    def used_bytes(self, size: int, itemsize: int) -> int:
        """Return the bytes of the codes without the gap behind them."""
        return sum(n * (k * itemsize + index_bytes(k)) for _, n, _, k in self.groups(size))

    def groups(self, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first element, the number of chunks, their rows, and the number of coefficients
        that are sent of each: of the full chunks, then of the last one."""
        full, rest = divmod(size, CHUNK)
        rows = -(-rest // SIDE)
        for first, count, height in ((0, full, SIDE), (full * CHUNK, int(rest > 0), rows)):
            if count:
                yield first, count, height, kept_count(height * SIDE, self.fraction)

    def round_trip(self, x: Array, iteration: int = 0) -> Array:
        found = np.zeros_like(x)
        for first, count, rows, k in self.groups(len(x)):
            stop = min(first + count * rows * SIDE, len(x))
            padded = np.zeros(count * rows * SIDE)
            padded[: stop - first] = x[first:stop]
            down, across = np.array(cosines(rows)), np.array(cosines(SIDE))
            for chunk in padded.reshape(count, rows, SIDE):
                coefficients = (down @ chunk @ across.T).ravel()
                dropped = np.abs(coefficients).argsort()[:-k]
                coefficients[dropped] = 0
                chunk[...] = down.T @ coefficients.reshape(rows, SIDE) @ across
            found[first:stop] = padded[: stop - first]
        return found

    def tensor_code(self) -> Any:
        return DCTTopKCode(self)


def cosines(size: int) -> list[list[float]]:
    """Return the matrix of the orthonormal DCT-II: row k holds the k-th cosine."""
    scales = [sqrt(1 / size), *[sqrt(2 / size)] * (size - 1)]
    return [
        [scale * cos(pi * k * (2 * n + 1) / (2 * size)) for n in range(size)]
        for k, scale in enumerate(scales)
    ]


class DCTTopKCode(CodeByRow):
    """DCTTopK on tensors. Codes: the values of all chunks, then their indices."""

    def __init__(self, codec: DCTTopK) -> None:
        self._codec = codec
        self._matrices: dict[tuple[int, Any, Any], Any] = {}

    def encode(self, x: Any, codes: Any) -> None:
        if x.dim() > 1:  # products of matrices round as those of a row alone
            for one, its in zip(x, codes, strict=True):
                self.encode(one, its)
            return
        codes[self._codec.used_bytes(len(x), x.itemsize) :] = 0
        for part, (count, rows, k), values, indices in self._groups(x, codes):
            down, across = self._matrix(rows, x), self._matrix(SIDE, x)
            coefficients = (down @ _in_rows(part, count, rows) @ across.T).flatten(-2)
            places = coefficients.abs().topk(k, sorted=False).indices
            sent = coefficients.gather(-1, places)
            values.copy_(sent)
            pack_indices(places, indices)
            part -= self._decode(places, sent, rows, x).flatten(-3)[..., : part.shape[-1]]

    def add(self, codes: Any, out: Any) -> None:
        if out.dim() > 1:
            for its, one in zip(codes, out, strict=True):
                self.add(its, one)
            return
        for part, (_, rows, k), values, indices in self._groups(out, codes):
            decoded = self._decode(unpack_indices(indices, k), values, rows, out)
            part += decoded.flatten(-3)[..., : part.shape[-1]]

    def _decode(self, places: Any, values: Any, rows: int, like: Any) -> Any:
        """Return the elements `[..., chunks, rows, 64]` of coefficients."""
        coefficients = like.new_zeros((*places.shape[:-1], rows * SIDE))
        coefficients.scatter_(-1, places, values)
        down, across = self._matrix(rows, like), self._matrix(SIDE, like)
        return down.T @ coefficients.unflatten(-1, (rows, SIDE)) @ across

    def _matrix(self, size: int, like: Any) -> Any:
        key = size, like.dtype, like.device
        if key not in self._matrices:
            self._matrices[key] = like.new_tensor(cosines(size))
        return self._matrices[key]

    def _groups(self, x: Any, codes: Any) -> Iterator[tuple[Any, tuple[int, int, int], Any, Any]]:
        """Yield the elements of the full chunks, then of the last one; the number of chunks, their
        rows and sent coefficients; and their values and indices in the codes."""
        groups = list(self._codec.groups(x.shape[-1]))
        edge = sum(count * k for _, count, _, k in groups)
        numbers = codes[..., : edge * x.itemsize].view(x.dtype)
        at, behind = 0, edge * x.itemsize
        for first, count, rows, k in groups:
            part, size = x[..., first : first + count * rows * SIDE], index_bytes(k)
            yield (
                part,
                (count, rows, k),
                numbers[..., at : at + count * k].unflatten(-1, (count, k)),
                codes[..., behind : behind + count * size].unflatten(-1, (count, size)),
            )
            at, behind = at + count * k, behind + count * size


def _in_rows(part: Any, count: int, rows: int) -> Any:
    """Return chunks `[..., count, rows, 64]`, with zeros behind the elements."""
    size = count * rows * SIDE
    if part.shape[-1] < size:
        padded = part.new_zeros((*part.shape[:-1], size))
        padded[..., : part.shape[-1]] = part
        part = padded
    return part.unflatten(-1, (count, rows, SIDE))
