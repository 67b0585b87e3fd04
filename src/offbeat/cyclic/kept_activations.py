"""Meter of the bytes that autograd saves for backward (activations)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Activations:
    """Counts bytes of storages that are saved for backward, as a context manager.

    A storage that is saved several times counts once. Storages of parameters do not count. A
    storage counts until backward has freed it.

    Attributes:
        live_bytes: bytes that are saved now.
        peak_bytes: maximum of `live_bytes` so far.
        missed: number of saved tensors without a storage, such as sparse tensors.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._holders: Counter[int] = Counter()  # by storage
        self._bytes: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = self.missed = 0

    def __enter__(self) -> Activations:
        self._hooks = saved_tensors_hooks(partial(SavedTensor, self), SavedTensor.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def add(self, tensor: Tensor) -> int | None:
        """Count one more saved tensor of a storage. Return the storage's key, or None if it does
        not count."""
        try:
            storage = tensor.untyped_storage()
            key, size_bytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse tensors and wrapper subclasses
            self.missed += 1
            return None
        # Compare with the current addresses: an update may move parameters.
        if not size_bytes or any(key == p.untyped_storage().data_ptr() for p in self._parameters()):
            return None
        if not key:  # a storage without memory
            self.missed += 1
            return None
        if not self._holders[key]:
            self.on_storage_saved(key, size_bytes)
        self._holders[key] += 1
        return key

    def on_storage_saved(self, key: int, size_bytes: int) -> None:
        """Add the bytes of a storage when its first tensor is saved."""
        self._bytes[key] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, key: int) -> None:
        """Count one saved tensor of a storage less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.on_storage_freed(key)

    def on_storage_freed(self, key: int) -> None:
        """Subtract the bytes of a storage when its last saved tensor is freed."""
        self.live_bytes -= self._bytes.pop(key)


class SavedTensor:
    """A tensor saved by autograd. Its destructor subtracts the tensor from the meter."""

    __slots__ = ("key", "meter", "tensor", "version")

    def __init__(self, meter: Activations, tensor: Tensor) -> None:
        self.key: int | None = None
        # A saved output that is not detached would keep its own graph alive.
        self.meter, self.tensor = meter, tensor.detach()
        self.version = self.tensor._version
        self.key = meter.add(tensor)

    def unpack(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            RuntimeError: the tensor was changed in place since it was saved. Autograd itself does
                not check this for tensors that hooks have packed.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.type()} {list(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version}"
            )
        return self.tensor

    def __del__(self) -> None:
        if self.key is not None:
            self.meter.drop(self.key)
