"""Module buffers that training writes, and the broadcast of rank 0's values of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.core.buckets.checksum import bytes_of, checksum


@dataclass(frozen=True)
class _Place:
    """Module, attribute and byte range of a buffer.

    The tensor is looked up on each use, because a script may assign another tensor.
    """

    name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int

    @property
    def tensor(self) -> Tensor:
        found = self.owner._buffers.get(self.attribute)
        if found is None or found.shape != self.shape or found.dtype != self.dtype:
            now = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ValueError(
                f"buffer {self.name!r} ({now}) must keep its shape and dtype ({self.dtype} "
                f"{list(self.shape)}), as rank 0's is broadcast; keep what grows in an attribute "
                "that is no buffer, or pass broadcast_buffers=False to offbeat.prepare"
            )
        return found


class ModuleBuffers:
    """Packs the buffers that training writes into one tensor of bytes, and unpacks rank 0's.

    Written buffers are found by checksums, because batch normalization and `.data` bypass version
    counters. Checksums are compared in the first iteration and with every comparison of replicas.
    """

    def __init__(self, model: nn.Module, is_source: bool, where: torch.device):
        self._model, self._is_source, self._where = model, is_source, where
        self._checksums: dict[str, int] | None = None
        self._places: list[_Place] = []
        self.size_bytes = 0
        self.before_packing: Callable[[], None] | None = None

    @property
    def names(self) -> list[str]:
        """Names of the buffers that are broadcast."""
        return [place.name for place in self._places]

    def forget(self) -> None:
        """Drop the checksums before other values are loaded."""
        self._checksums = None

    def note(self) -> None:
        """Record checksums before a forward, unless they are recorded already."""
        if self._checksums is None:
            self._checksums = _checksums(self._model)

    def changed_names(self) -> list[str] | None:
        """Return the names of buffers that have changed since the last checksums, and record new
        ones. Return None if no checksums were recorded."""
        before, self._checksums = self._checksums, _checksums(self._model)
        if before is None:
            return None
        now = self._checksums
        return [name for name in now if now[name] != before.get(name, now[name])]

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[list[int], str]]:
        """Return shape and dtype of the buffers of these names that the model has now."""
        found = {name: buffer for name, _, _, buffer in _buffers(self._model)}
        return {n: ([*found[n].shape], str(found[n].dtype)) for n in names if n in found}

    def share(self, names: Iterable[str]) -> list[str]:
        """Broadcast these buffers too from now on. Return the names that are new."""
        found = {name: (owner, key) for name, owner, key, _ in _buffers(self._model)}
        new = sorted(name for name in names if name in found and name not in self.names)
        if new:
            self._place({name: found[name] for name in sorted([*self.names, *new])})
        return new

    def _place(self, found: dict[str, tuple[nn.Module, str]]) -> None:
        tensors = {name: owner._buffers[key] for name, (owner, key) in found.items()}
        # Sort by element size, so that every part begins at a multiple of its element size.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # type: ignore[union-attr]
        self._places, at = [], 0
        for name in order:
            tensor = tensors[name]
            assert tensor is not None
            place = _Place(name, *found[name], tensor.shape, tensor.dtype, at, at + tensor.nbytes)
            self._places.append(place)
            at = place.end
        self.size_bytes = at

    def pack(self) -> tuple[Tensor, ...]:
        """Return the bytes of the buffers on the rank that sends them, and memory of their size on
        other ranks."""
        if self.before_packing is not None:
            self.before_packing()
        if not self._places:
            return ()
        if not self._is_source:
            for place in self._places:
                _ = place.tensor  # raises if the shape differs from rank 0's
            return (torch.empty(self.size_bytes, dtype=torch.uint8, device=self._where),)
        parts = [bytes_of(place.tensor).to(self._where) for place in self._places]
        return (torch.cat(parts),)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Write the received bytes into this rank's buffers."""
        if self._is_source or not tensors:
            return
        [packed] = tensors
        with torch.no_grad():
            for place in self._places:
                part = packed[place.begin : place.end]
                place.tensor.copy_(part.view(place.dtype).view(place.shape))


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, attribute and value of every dense, non-empty buffer, each once."""
    known: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided or not buffer.numel():
                continue
            if id(buffer) not in known:
                known.add(id(buffer))
                yield f"{prefix}.{key}".lstrip("."), module, key, buffer


def has_buffers(model: nn.Module) -> bool:
    """Whether a model has a dense, non-empty buffer, which a forward might write."""
    return next(_buffers(model), None) is not None


def _checksums(model: nn.Module) -> dict[str, int]:
    return {name: checksum(buffer) for name, _, _, buffer in _buffers(model)}
