"""Exchange: samples of some ranks become known to all."""

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
    """For each tensor of the batch the shared samples of all sharers, in their order.

    `chosen[i]` are the samples that rank `sharers[i]` gives; all ranks know how many, and have
    tensors of the same dtypes and shapes. One message per sharer.
    """
    parts: list[list[Tensor]] = [[] for _ in own]
    for sharer, indices in zip(sharers, chosen, strict=True):
        if not indices:
            continue
        mine = sharer == dist.get_rank()
        message = pack(own, indices) if mine else room(own, len(indices))
        dist.broadcast(message, src=sharer, group=group)
        for collected, tensor in zip(parts, unpack(message, own, len(indices)), strict=True):
            collected.append(tensor)
    return [torch.cat(collected) for collected in parts]


def pack(tensors: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """The bytes of some samples of a batch, tensor after tensor, on the host."""
    return torch.cat([_bytes(tensor[list(indices)].cpu()) for tensor in tensors])


def room(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Memory for so many packed samples."""
    return torch.empty(
        sum(_size(tensor, count) for tensor in tensors), dtype=torch.uint8, device="cpu"
    )


def unpack(message: Tensor, like: Sequence[Tensor], count: int) -> list[Tensor]:
    """What was packed, on the devices of these tensors."""
    parts = message.split([_size(tensor, count) for tensor in like])
    return [
        # The copy begins at an address that suits its type; a view might not.
        part.clone().view(tensor.dtype).view(count, *tensor.shape[1:]).to(tensor.device)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _size(tensor: Tensor, count: int) -> int:
    return count * tensor[:1].numel() * tensor.element_size()
