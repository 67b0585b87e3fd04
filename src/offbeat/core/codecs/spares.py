"""Pool of host memory for tensors.

The system clears new memory page by page, which takes longer than encoding and decoding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from threading import Lock

import torch
from torch import Tensor


class Spares:
    """Pool of flat host tensors. One thread may take a tensor and another thread give it back.

    The pool holds as many storages as have been in use at the same time, and replaces a storage by
    a larger one when needed. Device memory is left to torch's allocator, see `Device.keep`.
    """

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []  # by size
        self._lock = Lock()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of `size` elements."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        storage = self._pop_fitting(size * dtype.itemsize)
        if storage is None:
            return torch.empty(size, dtype=dtype, device="cpu")
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (size,), (1,))

    def give(self, x: Tensor) -> None:
        """Put a tensor's storage back into the pool. The caller must not use `x` afterwards."""
        if x.device.type == "cpu":
            with self._lock:
                insort(self._free, x.untyped_storage(), key=len)

    def _pop_fitting(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Remove and return the smallest storage that is large enough.

        If there is none, remove the largest storage and return None: the caller's new storage will
        replace it.
        """
        with self._lock:
            at = bisect_left(self._free, size_bytes, key=len)
            if at < len(self._free):
                return self._free.pop(at)
            if self._free:
                self._free.pop()
            return None
