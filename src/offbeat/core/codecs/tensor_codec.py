"""Protocol of codecs on tensors, and the operations that they share.

An implementation computes the same as `Codec.round_trip` does in NumPy, in few passes over memory.
It processes flat tensors in pieces that fit the cache.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offbeat.core.codecs.codec import BLOCK, LEAST_SCALE


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
