"""What a codec does to tensors: the same as its rule in `numerics/codecs`, in few passes.

Tensors are flat and worked on in pieces that stay in the cache.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offbeat.core.codecs.codec import BLOCK, LEAST_SCALE


class Code(Protocol):
    """A codec for tensors of float32 or float64. Codes are tensors of bytes.

    Tensors are flat. A table is several of the same length, one in each row.
    """

    def encode(self, x: Tensor, codes: Tensor) -> None:
        """Write the codes of a tensor, or row by row of a table; x becomes what they have lost."""
        ...

    def add(self, codes: Tensor, out: Tensor) -> None:
        """Add what is decoded of codes, or row by row of a table of codes to one of numbers."""
        ...

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        """Add what is decoded of each row of a table to one tensor, in the order of the rows."""
        ...


def in_blocks(x: Tensor) -> Tensor:
    """Tensors as rows of 256: as they are, or a copy whose last rows are filled up with zeros."""
    rest = -x.shape[-1] % BLOCK
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).unflatten(-1, (-1, BLOCK))


def inverse_of(scales: Tensor) -> Tensor:
    """1 over each scale; 0 for 0."""
    return torch.where(scales > 0, scales.reciprocal(), 0.0)


def usable(scales: Tensor) -> Tensor:
    """As bf16, zero in place of those that are too small to divide by."""
    halves = scales.bfloat16()
    return halves.masked_fill_(halves < LEAST_SCALE, 0.0)
