"""Memory of the C library and of Linux: huge pages, and return of freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

HUGE_BYTES = 2 << 20  # a huge page of Linux
MADV_HUGEPAGE = 14


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized flat tensor, on the host in huge pages if Linux allows them.

    Otherwise the processor translates an address every 4 KB, in the forward, in the backward and in
    the update. The memory before and behind the tensor is never written, so it takes no space.
    """
    advise = _c_function("madvise") if sys.platform == "linux" and device.type == "cpu" else None
    size_bytes = size * dtype.itemsize
    advised = size_bytes // HUGE_BYTES * HUGE_BYTES
    if advise is None or not advised:
        return torch.empty(size, dtype=dtype, device=device)
    whole = torch.empty(size_bytes + HUGE_BYTES, dtype=torch.uint8, device=device)
    begin = -whole.data_ptr() % HUGE_BYTES
    # With a storage of its own, which is saved without the memory before and behind.
    tensor = from_dlpack(whole[begin : begin + size_bytes]).view(dtype)
    advise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(advised), MADV_HUGEPAGE)
    return tensor


def give_back() -> None:
    """Return memory to the operating system that glibc keeps after it was freed.

    Later allocations have other sizes and would not reuse that memory.
    """
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _c_function(name: str) -> Any:
    """Return a function of the C library, or None without it."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
