"""Pinned host memory, to and from which a GPU copies without a wait of the host."""

from __future__ import annotations

from typing import Any
from weakref import finalize

import torch
from torch import Tensor


def pinned_memory(size: int, dtype: torch.dtype) -> Tensor:
    """Return a pinned tensor of `size` uninitialized elements on the host.

    Its memory is of this size and is freed with the tensor, after which no copy may use it. Torch's
    allocator of pinned memory rounds sizes up to a power of two and keeps freed memory. It is used
    where the system does not allow to pin existing memory.
    """
    tensor = torch.empty(size, dtype=dtype, device="cpu")
    if not size:
        return tensor
    runtime: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)):
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
    finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return tensor
