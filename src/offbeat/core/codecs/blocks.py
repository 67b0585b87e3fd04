"""Tensor implementations of int8, int4 and sign: blocks of 256 elements with one scale each.

Layout of the codes: the quantized numbers of all blocks, then the scales of all blocks in bf16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat.core.codecs.codec import BLOCK, LEAST_SCALE
from offbeat.core.codecs.pieces import PIECE, pieces
from offbeat.core.codecs.quantization import Int4, Int8, Sign

HALF = BLOCK // 2


class BlockCode(ABC):
    """Base of codecs with few bits per number and one scale per block.

    Attributes:
        width: bytes of one block's quantized numbers.
    """

    width: int

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def _buffer(self, like: Tensor, which: int = 0) -> Tensor:
        """Return scratch memory shaped like `like`. It is reused, because new memory page-faults.

        Buffers with different `which` do not overlap.
        """
        if like.numel() > PIECE:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        key = which, like.dtype, like.device
        if key not in self._scratch:
            self._scratch[key] = torch.empty(PIECE, dtype=like.dtype, device=like.device)
        return self._scratch[key][: like.numel()].view(like.shape)

    def encode(self, x: Tensor, codes: Tensor) -> None:
        if x.dim() > 1 and x.shape[-1] > PIECE:
            for one, its in zip(x, codes, strict=True):
                self.encode(one, its)
            return
        for given, numbers, scales in _passes(x, *self._parts(codes)):
            rows = in_blocks(given)
            self._scale(rows, given.shape[-1], scales)
            self._encode(rows, numbers, _as_factors(scales, rows))
            _copy_back(rows, given)

    def add(self, codes: Tensor, out: Tensor) -> None:
        for one, its in [(out, codes)] if out.dim() == 1 else zip(out, codes, strict=True):
            self.add_all(its.unsqueeze(0), one)

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        for to, numbers, scales in _passes(out, *self._parts(codes)):
            rows = in_blocks(to)
            for one, its in zip(numbers, scales, strict=True):
                self._add(rows, one, _as_factors(its, rows))
            _copy_back(rows, to)

    def _parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Split codes into quantized numbers `[..., blocks, width]` and scales `[..., blocks]`."""
        count = codes.shape[-1] // (self.width + 2)
        edge = count * self.width
        numbers = codes[..., :edge].unflatten(-1, (count, self.width))
        return numbers, codes[..., edge:].view(torch.bfloat16)

    @abstractmethod
    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        """Write the scales of blocks `rows`, which hold `size` elements without padding."""

    @abstractmethod
    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        """Write the quantized numbers of `rows`; replace `rows` by the quantization error."""

    @abstractmethod
    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        """Add the decoded numbers to `rows`."""


def in_blocks(x: Tensor) -> Tensor:
    """Return blocks `[..., blocks, 256]`: a view, or a zero-padded copy if n % 256 is not 0."""
    rest = -x.shape[-1] % BLOCK
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).unflatten(-1, (-1, BLOCK))


def inverse_of(scales: Tensor) -> Tensor:
    """Return the reciprocal of each scale, or 0 for a scale of 0."""
    return torch.where(scales > 0, scales.reciprocal(), 0.0)


def zero_tiny(scales: Tensor) -> Tensor:
    """Convert scales to bf16 and replace those below `LEAST_SCALE` by 0."""
    halves = scales.bfloat16()
    return halves.masked_fill_(halves < LEAST_SCALE, 0.0)


def _passes(x: Tensor, numbers: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the elements, quantized numbers and scales of each pass: one piece or a table of them.

    The layout of the codes depends on pieces only, not on the number of pieces per pass.
    """
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
    """Convert scales to the dtype of `rows`, one column per block."""
    return scales.to(rows.dtype).unsqueeze(-1)


def _copy_back(rows: Tensor, given: Tensor) -> None:
    """Copy blocks back into `given` if `in_blocks` has padded a copy."""
    if rows.data_ptr() != given.data_ptr():
        given.copy_(rows.flatten(-2)[..., : given.shape[-1]])


class MultipleCode(BlockCode):
    """Base of codecs that round to the nearest integer multiple of the scale."""

    most: int

    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        # abs and amax of a row are much faster than a norm, or than amax and amin. Rounding a
        # scale to bf16 changes it by at most 2^-9, so no multiple exceeds `most`.
        scales.copy_(zero_tiny(torch.abs(rows, out=self._buffer(rows)).amax(-1) / self.most))

    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        work = torch.mul(rows, inverse_of(factors), out=self._buffer(rows)).round_()
        rows.addcmul_(work, factors, value=-1)
        self._pack(work, numbers)

    @abstractmethod
    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        """Write the multiples as bytes."""


class Int8Code(MultipleCode):
    """int8: one byte per number."""

    width, most = Int8.width, Int8.most

    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        numbers.view(torch.int8).copy_(multiples)

    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        rows.addcmul_(self._buffer(rows).copy_(numbers.view(torch.int8)), factors)


class Int4Code(MultipleCode):
    """int4: half a byte per number.

    A block shares its bytes with the block that lies half a piece further on in the same piece. If
    the number of blocks is odd, the elements i and i + 128 of the last block share a byte.
    """

    width, most = Int4.width, Int4.most

    def _pack(self, multiples: Tensor, numbers: Tensor) -> None:
        for low, high, codes, _ in self._pairs(multiples, numbers):
            # The byte is a + 16 b, from -119 to 119. Float sums of small integers are exact.
            # Float arithmetic is faster than byte shifts, and conversion to signed bytes is faster
            # than to unsigned bytes.
            codes.copy_(low.add_(high, alpha=16))

    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        for low, high, codes, (a, b) in self._pairs(rows, numbers, factors):
            both = self._buffer(low).copy_(codes)
            sixteenths = torch.mul(both, 1 / 16, out=self._buffer(low, 1)).round_()
            high.addcmul_(sixteenths, b)
            low.addcmul_(both.sub_(sixteenths, alpha=16), a)

    @staticmethod
    def _pairs(
        rows: Tensor, numbers: Tensor, scales: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]]:
        """Yield the two halves that share bytes, the signed bytes, and the scales of each half."""
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


class SignCode(BlockCode):
    """sign: one bit per number, set if the number is not negative.

    Bit k of byte i of a block belongs to element i + 32 k.
    """

    width = Sign.width

    def _scale(self, rows: Tensor, size: int, scales: Tensor) -> None:
        # Divided before, because the sum of large magnitudes may overflow.
        means = torch.abs(rows, out=self._buffer(rows)).div_(BLOCK).sum(-1)
        if rest := size % BLOCK:
            means[..., -1] *= BLOCK / rest
        scales.copy_(means)

    def _encode(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        bits = (rows >= 0).to(torch.uint8)
        work = self._buffer(rows)
        numbers.copy_(bits[..., : self.width])
        for k in range(1, 8):
            numbers.bitwise_or_(bits[..., k * self.width : (k + 1) * self.width] << k)
        rows.addcmul_(work.copy_(bits), 2 * factors, value=-1).add_(factors)

    def _add(self, rows: Tensor, numbers: Tensor, factors: Tensor) -> None:
        # Add sign times scale in one operation. Two operations would round twice, and the result
        # would differ from codes that are decoded before they are added.
        places = torch.arange(8, dtype=torch.int8, device=numbers.device).unsqueeze(-1)
        bits = (numbers.view(torch.int8).unsqueeze(-2) >> places).bitwise_and_(1)
        signs = self._buffer(rows).copy_(bits.mul_(2).sub_(1).view(rows.shape))
        rows.addcmul_(signs, factors)
