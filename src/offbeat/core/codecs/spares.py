"""Spares: memory that is used again. Fresh memory costs more than encoding and decoding do: the
system clears it page by page."""

from __future__ import annotations

from bisect import bisect_left, insort
from threading import Lock

import torch
from torch import Tensor


class Spares:
    """Flat tensors of the host, taken on one thread and given back on another.

    There are as many as were ever in use at once, each as large as the largest that it was. Memory
    of a device is left to torch, which knows what its streams are still doing with it.
    """

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []  # by size
        self._lock = Lock()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many elements of any value."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        storage = self._smallest(size * dtype.itemsize)
        if storage is None:
            return torch.empty(size, dtype=dtype, device="cpu")
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (size,), (1,))

    def give(self, x: Tensor) -> None:
        """Take back all memory of a tensor; nobody may use it any longer."""
        if x.device.type == "cpu":
            with self._lock:
                insort(self._free, x.untyped_storage(), key=len)

    def _smallest(self, size_bytes: int) -> torch.UntypedStorage | None:
        """One that is large enough; if there is none, the next one will take the place of the
        largest."""
        with self._lock:
            at = bisect_left(self._free, size_bytes, key=len)
            if at < len(self._free):
                return self._free.pop(at)
            if self._free:
                self._free.pop()
            return None
