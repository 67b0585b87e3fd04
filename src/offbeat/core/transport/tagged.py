"""Collectives of control messages, by messages between two ranks with a tag of their own.

gloo matches the collectives of a group by their order. A script, or a thread of it, may use the
default process group at the same time as control messages do. Messages with a tag match only each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.peer_errors import mark_peer_error

TAG = 0x0FFBEA7


def all_gather_sized(own: bytes, sizes: Sequence[int], group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank, by rank.

    It takes ceil(log2 N) rounds; gloo's own all-gather takes N - 1.

    Source: Bruck et al. 1997, Efficient Algorithms for All-to-All Communications.

    Args:
        own: bytes of this rank.
        sizes: number of bytes of each rank. Messages without bytes are not sent.
        group: group of the ranks.
    """
    rank, ranks = group.rank(), group.size()
    held = [own]  # of this rank and of those ahead of it
    with _mark_errors():
        while (count := len(held)) < ranks:
            more = min(count, ranks - count)
            ahead = [sizes[(rank + count + place) % ranks] for place in range(more)]
            given, taken = bytearray(b"".join(held[:more])), bytearray(sum(ahead))
            works = []
            if taken:
                received = torch.frombuffer(taken, dtype=torch.uint8)
                works.append(group.recv([received], (rank + count) % ranks, TAG))
            if given:
                sent = torch.frombuffer(given, dtype=torch.uint8)
                works.append(group.send([sent], (rank - count) % ranks, TAG))
            for work in works:
                work.wait()
            end = 0
            for size in ahead:
                held.append(bytes(taken[end : end + size]))
                end += size
    return [held[(other - rank) % ranks] for other in range(ranks)]


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Copy a contiguous tensor of the rank `source` of the group to all ranks of the group, along a
    binomial tree."""
    rank, ranks = group.rank(), group.size()
    place, width = (rank - source) % ranks, 1  # the source has the place 0
    while width < ranks and not place & width:
        width *= 2
    with _mark_errors():
        if place:
            group.recv([tensor], (rank - width) % ranks, TAG).wait()
        while width := width // 2:
            if place + width < ranks:
                group.send([tensor], (rank + width) % ranks, TAG).wait()


@contextmanager
def _mark_errors() -> Iterator[None]:
    """Mark a RuntimeError of the block as an error of a wait for other ranks."""
    try:
        yield
    except RuntimeError as error:
        mark_peer_error(error)
        raise
