"""Batches of tensors in nested tuples, lists and dictionaries, and broadcasts of their samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def leaves(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch in order. Raise ValueError for other contents."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [leaf for part in batch for leaf in leaves(part)]
    raise ValueError(
        f"batch ({type(batch).__name__} in it) must consist of tensors in tuples, lists and "
        "dictionaries, as only those can be sent; convert it in the loader's collate_fn"
    )


def rebuild(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a batch of the same structure with other tensors."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)  # keeps the type of the mapping
        for key in batch:
            made[key] = rebuild(batch[key], tensors)
        return made
    parts = [rebuild(part, tensors) for part in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def samples_of(tensors: Sequence[Tensor]) -> int:
    """Return the number of samples of a batch, the common length of its tensors. Raise ValueError
    if lengths differ.
    """
    lengths = {len(tensor) if tensor.ndim else None for tensor in tensors}
    count = lengths.pop() if len(lengths) == 1 else None
    if count is None:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
        raise ValueError(
            f"tensors of a batch (shapes {shapes}) must agree in their first dimension, the "
            "samples; put other things beside the batch"
        )
    return count


def kind(tensors: Sequence[Tensor]) -> str:
    """Return the types of one sample as text, such as 'float32 1x8x8, int64'."""
    return ", ".join(
        " ".join([str(t.dtype).removeprefix("torch."), "x".join(map(str, t.shape[1:]))]).strip()
        for t in tensors
    )


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
