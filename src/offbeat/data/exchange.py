"""Broadcast of samples of some ranks to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def pool(
    own: Sequence[Tensor],
    sharers: Sequence[int],
    chosen: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Return the shared samples of all sharing ranks, one tensor for each tensor of the batch.

    Every rank must call it, with equal dtypes, shapes and numbers of shared samples. Each sharing
    rank sends one message.

    Args:
        own: tensors of the batch of this rank.
        sharers: ranks that share samples.
        chosen: indices of the samples that each of these ranks shares.
        group: process group of the messages.
    """
    parts: list[list[Tensor]] = [[] for _ in own]
    for sharer, indices in zip(sharers, chosen, strict=True):
        if not indices:
            continue
        mine = sharer == dist.get_rank()
        message = pack(own, indices) if mine else empty_message(own, len(indices))
        dist.broadcast(message, src=sharer, group=group)
        for collected, tensor in zip(parts, unpack(message, own, len(indices)), strict=True):
            collected.append(tensor)
    return [torch.cat(collected) for collected in parts]


def pack(tensors: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """Return the bytes of some samples of a batch on the host, tensor after tensor."""
    return torch.cat([_bytes(tensor[list(indices)].cpu()) for tensor in tensors])


def empty_message(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Return memory for `count` packed samples."""
    return torch.empty(
        sum(_size(tensor, count) for tensor in tensors), dtype=torch.uint8, device="cpu"
    )


def unpack(message: Tensor, like: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the tensors of packed samples, on the devices of `like`."""
    parts = message.split([_size(tensor, count) for tensor in like])
    return [
        # A copy is aligned for its dtype; a view might not be.
        part.clone().view(tensor.dtype).view(count, *tensor.shape[1:]).to(tensor.device)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _size(tensor: Tensor, count: int) -> int:
    return count * tensor[:1].numel() * tensor.element_size()
