"""Byte layout of one rank's message: a head, codes, and unencoded elements."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
        head_bytes: bytes of the head; 0 for rows that continue other ones.
    """

    code_bytes: int
    plain_bytes: int = 0
    head_bytes: int = HEAD_BYTES

    @property
    def bytes(self) -> int:
        return self.head_bytes + sum(align(n, ALIGNED) for n in (self.code_bytes, self.plain_bytes))

    def make(self, count: int, where: torch.device) -> Tensor:
        """Return `count` uninitialized rows. The next call in this thread reuses their memory."""
        [table] = make_tables([self], count, where)
        return table

    def codes(self, rows: Tensor, size: int | None = None) -> Tensor:
        """Return the codes of one row or of several rows, or their first `size` bytes."""
        start = self.head_bytes
        return rows[..., start : start + (self.code_bytes if size is None else size)]

    def plain_numbers(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the unencoded elements of one row."""
        start = self.head_bytes + align(self.code_bytes, ALIGNED)
        return row[start : start + self.plain_bytes].view(dtype)


def make_tables(layouts: Sequence[Rows], count: int, where: torch.device) -> list[Tensor]:
    """Return `count` uninitialized rows of each layout. The next call in this thread reuses their
    memory."""
    sizes = [count * rows.bytes for rows in layouts]
    like = torch.empty(0, dtype=torch.uint8, device=where)
    tables = _scratch().reserve(like, sum(sizes)).split(sizes)
    return [table.view(count, -1) for table in tables]


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
