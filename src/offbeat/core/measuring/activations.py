"""Activations: bytes that autograd keeps for backward, while they are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Activations:
    """Counts bytes of storages that are saved for backward while it is entered; a storage that is
    saved several times counts once. Storages of the parameters do not count.

    `live_bytes` is what is kept now, `peak_bytes` the most so far. What is saved inside must also
    be used, or freed, before it is counted as gone. `missed` tensors had no storage to count
    (sparse ones, for example).
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._holders: Counter[int] = Counter()  # by storage
        self._bytes: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = self.missed = 0

    def __enter__(self) -> Activations:
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def pack(self, tensor: Tensor) -> Kept:
        """What autograd keeps instead of the tensor."""
        return Kept(self, tensor)

    def unpack(self, kept: Kept) -> Tensor:
        """The tensor; RuntimeError if it was changed meanwhile, as autograd itself cannot tell
        under hooks."""
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {kept.tensor.type()} {list(kept.tensor.shape)} is at version "
                f"{kept.tensor._version}; expected version {kept.version}"
            )
        return kept.tensor

    def add(self, tensor: Tensor) -> int | None:
        """One more holder of a tensor's storage; its key, or None if it does not count."""
        try:
            storage = tensor.untyped_storage()
            key, size_bytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper of other tensors
            self.missed += 1
            return None
        # Asked each time: an update may put parameters elsewhere.
        if not size_bytes or any(key == p.untyped_storage().data_ptr() for p in self._parameters()):
            return None
        if not key:  # bytes that are nowhere
            self.missed += 1
            return None
        if not self._holders[key]:
            self.begins(key, size_bytes)
        self._holders[key] += 1
        return key

    def begins(self, key: int, size_bytes: int) -> None:
        """A storage has its first holder."""
        self._bytes[key] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, key: int) -> None:
        """One holder less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.ends(key)

    def ends(self, key: int) -> None:
        """A storage has lost its last holder."""
        self.live_bytes -= self._bytes.pop(key)


class Kept:
    """A tensor in autograd's hands."""

    __slots__ = ("key", "meter", "tensor", "version")

    def __init__(self, meter: Activations, tensor: Tensor) -> None:
        self.key: int | None = None
        # Detached: an output that is saved would keep its own graph alive for ever.
        self.meter, self.tensor = meter, tensor.detach()
        self.version = self.tensor._version
        self.key = meter.add(tensor)

    def __del__(self) -> None:
        if self.key is not None:
            self.meter.drop(self.key)
