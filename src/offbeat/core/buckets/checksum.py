"""Checksums of tensors, to compare tensors of different ranks bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offbeat.core.buckets.shards import local_of

_CHUNK = 1 << 20  # bytes; bounds the memory of a checksum, and fits into the cache
_COLUMNS = 512  # words of 8 bytes
_GROWTH = 6364136223846793005  # odd, so that a change of a single chunk changes the sum
_WORD = 2**64


def checksum(*tensors: Tensor) -> int:
    """Return a 64-bit checksum of the bits of all tensors, the same on every device.

    Of sharded tensors, the bits are those of this rank's shard.

    Words of 8 bytes are added up modulo 2^64. Odd weights by column and by chunk make the sum
    depend on the position of a word.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in map(local_of, tensors):
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(bytes_of(tensor))
    total = 0
    for pieces in by_device.values():
        total = (total * _GROWTH + _fold_chunks(pieces)) % _WORD
    return total


def _fold_chunks(pieces: list[Tensor]) -> int:
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=pieces[0].device)
    for words in _chunks(pieces):
        columns = columns * _GROWTH_AS_INT64 + words.view(-1, _COLUMNS).sum(0)
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=columns.device, dtype=torch.int64)
    return int((columns * weights).sum()) % _WORD


_GROWTH_AS_INT64 = (_GROWTH + _WORD // 2) % _WORD - _WORD // 2


def _chunks(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of all pieces as chunks of int64 words. The last chunk is zero-padded."""
    waiting: list[Tensor] = []
    room = _CHUNK
    for piece in pieces:
        while piece.numel() >= room:
            yield _words([*waiting, piece[:room]])
            waiting, piece, room = [], piece[room:], _CHUNK
        if piece.numel():
            waiting.append(piece)
            room -= piece.numel()
    if waiting:
        fill = -sum(p.numel() for p in waiting) % (8 * _COLUMNS)
        yield _words([*waiting, waiting[0].new_zeros(fill)])


def _words(pieces: list[Tensor]) -> Tensor:
    aligned = len(pieces) == 1 and pieces[0].storage_offset() % 8 == 0
    return (pieces[0] if aligned else torch.cat(pieces)).view(torch.int64)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat tensor; a copy if the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
