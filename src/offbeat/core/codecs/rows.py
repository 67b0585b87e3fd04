"""Byte layout of one rank's message: a head, codes, and unencoded elements."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.codecs.codec import align
from offbeat.core.transport.collectives import Scratch

ALIGNED = 16  # bytes; alignment of each part of a row, so that it can be viewed as any dtype
HEAD_BYTES = ALIGNED
# Indices of the two integers in the head of a row. The integer at BAD is 1 if the rank's values are
# not finite, else 0. The integer at ORIGIN is a fingerprint of the parameters to which encoded
# changes are relative.
BAD, ORIGIN = 0, 1


@dataclass(frozen=True)
class Rows:
    """Layout of equally long rows.

    Attributes:
        code_bytes: bytes of the codes in a row.
        plain_bytes: bytes of the unencoded elements in a row.
    """

    code_bytes: int
    plain_bytes: int = 0

    @property
    def bytes(self) -> int:
        return HEAD_BYTES + sum(align(n, ALIGNED) for n in (self.code_bytes, self.plain_bytes))

    def make(self, count: int, where: torch.device) -> Tensor:
        """Return `count` uninitialized rows. The next call in this thread reuses their memory."""
        like = torch.empty(0, dtype=torch.uint8, device=where)
        return _scratch().reserve(like, count * self.bytes).view(count, -1)

    def codes(self, rows: Tensor, size: int | None = None) -> Tensor:
        """Return the codes of one row or of several rows, or their first `size` bytes."""
        return rows[..., HEAD_BYTES : HEAD_BYTES + (self.code_bytes if size is None else size)]

    def plain_numbers(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the unencoded elements of one row."""
        start = HEAD_BYTES + align(self.code_bytes, ALIGNED)
        return row[start : start + self.plain_bytes].view(dtype)


_mine = threading.local()


def _scratch() -> Scratch:
    """Return the scratch memory of this thread."""
    if not hasattr(_mine, "scratch"):
        _mine.scratch = Scratch()
    return _mine.scratch


def write_heads(rows: Tensor, bad: bool, origin: int) -> None:
    """Write the head of one row or of several rows."""
    heads = rows[..., :HEAD_BYTES].view(torch.int64)
    heads[..., BAD] = int(bad)
    heads[..., ORIGIN] = origin


def read_heads(rows: Tensor) -> tuple[list[int], list[int]]:
    """Return the ranks whose values are not finite, and the origin of every rank."""
    heads = rows[:, :HEAD_BYTES].view(torch.int64).tolist()
    return [rank for rank, head in enumerate(heads) if head[BAD]], [head[ORIGIN] for head in heads]
