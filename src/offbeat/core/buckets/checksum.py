"""Checksums of tensors, to compare tensors of different ranks bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offbeat.core.buckets.shards import local_of

_CHUNK = 1 << 20  # bytes; a chunk fits into the cache of a processor
_BATCH = 64  # chunks that a GPU adds up in one operation; bounds the memory of a checksum
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


def _fold_chunks(pieces: list[Tensor], batch: int | None = None) -> int:
    """Return the checksum of pieces on one device.

    Args:
        pieces: bytes.
        batch: most chunks in one operation; by default `_BATCH` on a GPU, otherwise 1. It does not
            change the checksum.
    """
    device = pieces[0].device
    batch = batch or (_BATCH if pieces[0].is_cuda else 1)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=device)
    growth = torch.tensor([_power(n) for n in reversed(range(batch))], device=device)
    for words in _chunks(pieces, batch):
        count = max(1, 8 * words.numel() // _CHUNK)
        sums = words.view(count, -1, _COLUMNS).sum(1)  # [chunks, columns]
        added = sums[0] if count == 1 else (sums * growth[-count:, None]).sum(0)
        columns = columns * _power(count) + added
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=columns.device, dtype=torch.int64)
    return int((columns * weights).sum()) % _WORD


def _power(n: int) -> int:
    """Return the weight of a chunk that `n` chunks follow, as a signed 64-bit integer."""
    return (pow(_GROWTH, n, _WORD) + _WORD // 2) % _WORD - _WORD // 2


def _chunks(pieces: Iterable[Tensor], batch: int) -> Iterator[Tensor]:
    """Yield the bytes of all pieces as int64 words: one chunk, or up to `batch` whole chunks of
    one piece. The last chunk is zero-padded."""
    waiting: list[Tensor] = []
    room = _CHUNK
    for piece in pieces:
        while piece.numel() >= room:
            if not waiting:
                room *= min(batch, piece.numel() // room)
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
