"""Detection of writes to the memory that parameters have left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat.core.buckets.checksum import checksum

LOOKS = 20  # steps to check; a plan may apply its first gradients some iterations late


class _Place(NamedTuple):
    name: str
    storage: StorageWeakRef
    like: Tensor  # empty tensor of the same dtype and device
    offset: int
    size: torch.Size
    strides: tuple[int, ...]

    def tensor(self) -> Tensor | None:
        """Return the parameter's former elements; None if no reference to them exists."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty_like(self.like).set_(storage, self.offset, self.size, self.strides)


class FormerMemory:
    """Memory from which parameters have moved, as long as references to it exist.

    An optimizer that keeps views of parameters (`p.data`) continues to write to this memory after
    the parameters have moved. So the weights that the model uses never change.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._looks = LOOKS
        self._known: list[tuple[_Place, int]] = []
        self._places = [
            _Place(
                name,
                StorageWeakRef(p.untyped_storage()),
                p.detach().new_empty(0),
                int(p.storage_offset()),
                p.size(),
                p.stride(),
            )
            for name, p in parameters.items()
            if p.numel()
        ]

    def note(self) -> None:
        """Record checksums of the memory. Call it after the parameters have moved."""
        held = [(place, place.tensor()) for place in self._places]
        self._known = [(place, checksum(t)) for place, t in held if t is not None]
        self._places = []

    def require_unwritten(self) -> None:
        """Raise ValueError if a parameter's former memory was written since `note`.

        Call it after each step. The memory is checked in the first `LOOKS` calls only.
        """
        if not self._known:
            return
        for place, known in self._known:
            tensor = place.tensor()
            if tensor is not None and checksum(tensor) != known:
                raise ValueError(
                    f"parameter {place.name!r} was updated in memory that it has left: the "
                    "optimizer keeps a view of it (such as p.data), and offbeat moves parameters "
                    "into buckets at offbeat.prepare and at the end of observation; let the "
                    "optimizer use the parameters of its param_groups in every step(), or use "
                    "strategy DDP(), which does not move them"
                )
        self._looks -= 1
        if not self._looks:
            self._known = []
