"""int8, int4 and sign on tensors: blocks of 256 with one scale each.

Codes are those of all blocks, then their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat.core.codecs import int4, int8
from offbeat.core.codecs.codec import BLOCK
from offbeat.core.codecs.fused import fused
from offbeat.core.codecs.pieces import PIECE, at_once, pieces
from offbeat.core.codecs.tensor_codec import in_blocks, inverse_of, usable

HALF = BLOCK // 2


class Blocks(ABC):
    """Numbers of a few bits, times a scale per block. `width`: bytes of a block's numbers."""

    width: int

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def _room(self, like: Tensor, which: int = 0) -> Tensor:
        """Memory of a piece's shape, the same for all pieces: new memory would cost page faults."""
        if like.numel() > PIECE:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        key = which, like.dtype, like.device
        if key not in self._scratch:
            self._scratch[key] = torch.empty(PIECE, dtype=like.dtype, device=like.device)
        return self._scratch[key][: like.numel()].view(like.shape)

    def encode(self, x: Tensor, codes: Tensor) -> None:
        if x.dim() > 1 and not _at_once(x):
            for one, to in zip(x, codes, strict=True):
                self.encode(one, to)
            return
        for given, numbers, scales in _passes(x, *self._parts(codes)):
            rows = in_blocks(given)
            self._scale(rows, given.shape[-1], scales)
            self._encode(rows, numbers, _as_factors(scales, rows))
            _give_back(rows, given)

    def add(self, codes: Tensor, out: Tensor) -> None:
        if out.dim() > 1 and not _at_once(out):
            for one, to in zip(codes, out, strict=True):
                self.add(one, to)
            return
        for to, numbers, scales in _passes(out, *self._parts(codes)):
            rows = in_blocks(to)
            self._add(rows, numbers, _as_factors(scales, rows))
            _give_back(rows, to)

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        each = out.expand(len(codes), -1)
        if _at_once(each):
            arrived = self._room(each, 2).zero_()
            self.add(codes, arrived)
            for one in arrived:
                out += one
            return
        for to, numbers, scales in _passes(out, *self._parts(codes)):
            rows = in_blocks(to)
            for one, its in zip(numbers, scales, strict=True):
                self._add(rows, one, _as_factors(its, rows))
            _give_back(rows, to)

    def _parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers by block, and scales."""
        count = codes.shape[-1] // (self.width + 2)
        edge = count * self.width
        numbers = codes[..., :edge].unflatten(-1, (count, self.width))
        return numbers, codes[..., edge:].view(torch.bfloat16)

    # What may be compiled ends where scales are rounded to bf16: compilers leave out conversions
    # there and back. Nor may two of its tensors share memory.

    @abstractmethod
    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        """Of blocks with so many elements."""

    @abstractmethod
    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        """Of blocks, by their scales; they become what is lost."""

    @abstractmethod
    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        """Add what is decoded, by block."""


def _at_once(x: Tensor) -> bool:
    """Whether one pass takes all rows of a table, filled up to whole blocks."""
    return len(x) * -(-x.shape[-1] // BLOCK) * BLOCK <= at_once(x)


def _passes(x: Tensor, numbers: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Elements, numbers and scales that one pass takes: a piece, or several as a table of them.
    Codes are laid out by pieces, so they do not depend on how many a pass takes."""
    if x.shape[-1] <= PIECE:
        yield x, numbers, scales
        return
    blocks = PIECE // BLOCK
    for cut in pieces(x):
        edge = cut.start + (cut.stop - cut.start) // PIECE * PIECE
        for a, b in ((cut.start, edge), (edge, cut.stop)):
            if a == b:
                continue
            own = slice(a // BLOCK, -(-b // BLOCK))
            one, its, scale = x[..., a:b], numbers[..., own, :], scales[..., own]
            if b - a > PIECE:
                one, scale = one.unflatten(-1, (-1, PIECE)), scale.unflatten(-1, (-1, blocks))
                its = its.unflatten(-2, (-1, blocks))
            yield one, its, scale


def _as_factors(scales: Tensor, rows: Tensor) -> Tensor:
    """Scales as they arrive, one for each row."""
    return scales.to(rows.dtype).unsqueeze(-1)


def _give_back(rows: Tensor, given: Tensor) -> None:
    """What became of the blocks, if these are a copy."""
    if rows.data_ptr() != given.data_ptr():
        given.copy_(rows.flatten(-2)[..., : given.shape[-1]])


class Multiples(Blocks):
    """Whole multiples of the scale, to the nearest."""

    most: int

    @fused
    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        # Of a row abs and amax are much faster than a norm, or than amax and amin. What rounding a
        # scale to bf16 changes (2^-9) takes no multiple beyond the most.
        scales.copy_(usable(torch.abs(rows, out=self._room(rows)).amax(-1) / self.most))

    @fused
    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        work = torch.mul(rows, inverse_of(factors), out=self._room(rows)).round_()
        rows.addcmul_(work, factors, value=-1)
        self._pack(work, numbers)

    @abstractmethod
    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        """Multiples as bytes."""


class Eight(Multiples):
    """A byte per number."""

    width, most = BLOCK, int8.MOST

    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        numbers.view(torch.int8).copy_(multiples)

    @fused
    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        rows.addcmul_(self._room(rows).copy_(numbers.view(torch.int8)), factors)


class Four(Multiples):
    """Half a byte per number: those of a block with those of another one of the same piece, half a
    piece further on. What is left, one block at most, has number i with number i + 128."""

    width, most = HALF, int4.MOST

    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        for low, high, codes, _ in self._pairs(multiples, numbers):
            # a + 16 b, from -119 to 119. Sums of small whole numbers are exact, floats are faster
            # than shifts of bytes, and signed bytes are made of them faster than unsigned ones.
            codes.copy_(low.add_(high, alpha=16))

    @fused
    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        for low, high, codes, (a, b) in self._pairs(rows, numbers, factors):
            both = self._room(low).copy_(codes)
            sixteenths = torch.mul(both, 1 / 16, out=self._room(low, 1)).round_()
            high.addcmul_(sixteenths, b)
            low.addcmul_(both.sub_(sixteenths, alpha=16), a)

    @staticmethod
    def _pairs(
        rows: Tensor, numbers: Tensor, scales: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]]:
        """Numbers that share bytes, these as signed ones, and their scales."""
        count, bytes_ = rows.shape[-2], numbers.view(torch.int8)
        half, whole = count // 2, count // 2 * 2
        scales = rows if scales is None else scales
        if half:
            codes = bytes_[..., :whole, :].view(*rows.shape[:-2], half, BLOCK)
            pair = scales[..., :half, :], scales[..., half:whole, :]
            yield rows[..., :half, :], rows[..., half:whole, :], codes, pair
        if whole < count:
            rest, codes = rows[..., whole:, :], bytes_[..., whole:, :]
            yield rest[..., :HALF], rest[..., HALF:], codes, (scales[..., whole:, :],) * 2


class One(Blocks):
    """A bit per number, set for those that are not negative; number i of a block with i + 32."""

    width = BLOCK // 8

    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        means = torch.abs(rows, out=self._room(rows)).sum(-1) / BLOCK
        if rest := size % BLOCK:
            means[..., -1] *= BLOCK / rest
        scales.copy_(means)

    @fused
    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        bits = (rows >= 0).view(torch.uint8)
        work = self._room(rows)
        numbers.copy_(bits[..., : self.width])
        for k in range(1, 8):
            numbers.bitwise_or_(bits[..., k * self.width : (k + 1) * self.width] << k)
        rows.addcmul_(work.copy_(bits), 2 * factors, value=-1).add_(factors)

    @fused
    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        # Plus or minus one times a scale, added in one operation: two would be rounded twice, and
        # differently where arrived codes are decoded before they are added up.
        places = torch.arange(8, dtype=torch.int8, device=numbers.device).unsqueeze(-1)
        bits = (numbers.view(torch.int8).unsqueeze(-2) >> places).bitwise_and_(1)
        signs = self._room(rows).copy_(bits.mul_(2).sub_(1).view(rows.shape))
        rows.addcmul_(signs, factors)
