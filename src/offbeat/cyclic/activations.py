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
    be used, or freed, before it is counted as gone.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._holders: Counter[int] = Counter()  # by storage
        self._bytes: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def __enter__(self) -> Activations:
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def add(self, tensor: Tensor) -> int | None:
        """One more holder of a tensor's storage; its key, or None if it does not count."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        # Asked each time: an update may put parameters elsewhere.
        if any(key == p.untyped_storage().data_ptr() for p in self._parameters()):
            return None
        if not self._holders[key]:
            self._bytes[key] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._holders[key] += 1
        return key

    def drop(self, key: int) -> None:
        """One holder less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            self.live_bytes -= self._bytes.pop(key)


class _Kept:
    """A tensor in autograd's hands."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, meter: Activations, tensor: Tensor) -> None:
        # Detached: an output that is saved would keep its own graph alive for ever.
        self.meter, self.tensor, self.key = meter, tensor.detach(), meter.add(tensor)

    def __del__(self) -> None:
        if self.key is not None:
            self.meter.drop(self.key)
