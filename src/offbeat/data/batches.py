"""Batches of tensors in nested tuples, lists and dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
