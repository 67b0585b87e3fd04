"""Rows: what one rank says in one message, as bytes: a head, codes, and what is not encoded."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.transport.collectives import Scratch

ALIGNED = 16  # bytes: every part of a row may be viewed as numbers
HEAD_BYTES = ALIGNED
BAD, ORIGIN = 0, 1  # of the head's two integers: were values not finite; what anchors began as


@dataclass(frozen=True)
class Rows:
    """Rows of equal length: so many bytes of codes, then so many as they are."""

    code_bytes: int
    plain_bytes: int = 0

    @property
    def bytes(self) -> int:
        return HEAD_BYTES + aligned(self.code_bytes) + aligned(self.plain_bytes)

    def make(self, count: int, where: torch.device) -> Tensor:
        """So many empty rows, in memory of this thread that the next ones will have."""
        like = torch.empty(0, dtype=torch.uint8, device=where)
        return _scratch().reserve(like, count * self.bytes).view(count, self.bytes)

    def codes(self, rows: Tensor, size: int | None = None) -> Tensor:
        """The codes of one row or of several: of so many bytes, if they are fewer."""
        return rows[..., HEAD_BYTES : HEAD_BYTES + (self.code_bytes if size is None else size)]

    def plain(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """What is not encoded of one row."""
        start = HEAD_BYTES + aligned(self.code_bytes)
        return row[start : start + self.plain_bytes].view(dtype)


_mine = threading.local()


def _scratch() -> Scratch:
    """This thread's."""
    if not hasattr(_mine, "scratch"):
        _mine.scratch = Scratch()
    return _mine.scratch


def aligned(size: int) -> int:
    """Bytes that so many take in a row."""
    return -(-size // ALIGNED) * ALIGNED


def write_head(rows: Tensor, bad: bool, origin: int) -> None:
    """Say what all ranks must know of a message beside its numbers, in one row or in several."""
    heads = rows[..., :HEAD_BYTES].view(torch.int64)
    heads[..., BAD] = int(bad)
    heads[..., ORIGIN] = origin


def read_heads(rows: Tensor) -> tuple[list[int], list[int]]:
    """Ranks whose values were not finite, and every rank's origin."""
    heads = rows[:, :HEAD_BYTES].view(torch.int64).tolist()
    return [rank for rank, head in enumerate(heads) if head[BAD]], [head[ORIGIN] for head in heads]
