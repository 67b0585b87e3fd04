"""Checksums of tensors: whether two are the same bit for bit, without having both."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_CHUNK = 1 << 20  # elements; bounds the memory that a checksum takes


def checksum(tensor: Tensor) -> int:
    """Sum of the bits read as integers, weighted by odd numbers so that places count: equal for
    equal tensors, on any device."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    whole = flat.view(_INTEGERS[flat.element_size()])
    weights = torch.arange(1, 2 * min(_CHUNK, whole.numel()), 2, device=flat.device)
    total = 0
    for i, chunk in enumerate(whole.split(_CHUNK)):
        total += int((chunk * weights[: chunk.numel()]).sum()) * (2 * i + 1)
    return total % 2**64
