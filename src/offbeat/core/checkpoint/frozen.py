"""Frozen values: whatever pickles, as it is now, with its tensors apart and copied to the host."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Look = tuple[torch.Size, tuple[int, ...], torch.dtype]

# Modules of classes in checkpoints of version 0.1.0, and where they are now.
MOVED = {
    "offbeat.measuring.noise": "offbeat.core.measuring.noise",
    "offbeat.numerics.change": "offbeat.core.rules.changed",
    "offbeat.solve.preserver": "offbeat.core.guards.loss_watch",
}


@dataclass(frozen=True)
class Frozen:
    """A value: its `pickle`, and its `tensors` by name, of which `looks` says shape, strides and
    dtype. Tensors that are one and the same, as of tied weights, are there once."""

    pickle: bytes
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def looks(self) -> dict[str, Look]:
        return {name: (t.size(), t.stride(), t.dtype) for name, t in self.tensors.items()}

    def thaw(self) -> Any:
        """The value, with these tensors."""
        return _Unpickler(self.pickle, self.tensors).load()


def freeze(value: Any, names: Mapping[str, Tensor]) -> Frozen:
    """A copy of `value`, which may change from now on. `names` are those of some of its tensors;
    others are numbered. ValueError for what does not pickle."""
    file = io.BytesIO()
    pickler = _Pickler(file, {_place(tensor): name for name, tensor in reversed([*names.items()])})
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"extra holds something that cannot be saved: {error}; give values that pickle, or "
            "objects with state_dict() and load_state_dict()"
        ) from error
    return Frozen(file.getvalue(), pickler.tensors)


def empty(look: Look) -> Tensor:
    """A tensor that looks so."""
    size, stride, dtype = look
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[Any, str]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names, self._seen = names, dict[Any, str]()
        self.tensors: dict[str, Tensor] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets their places

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        place = _place(obj)
        if place not in self._seen:
            self._alive.append(obj)
            name = self._names.get(place, f"tensor.{len(self.tensors)}")
            self._seen[place] = name
            self.tensors[name] = obj.detach().to("cpu", copy=True)
        return self._seen[place]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Mapping[str, Tensor]):
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module_name: str, global_name: str) -> Any:
        return super().find_class(MOVED.get(module_name, module_name), global_name)

    def persistent_load(self, pid: str) -> Tensor:
        return self._tensors[pid]


def _place(tensor: Tensor) -> Any:
    """The same for tensors that are one and the same; of empty ones each is its own."""
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.size(), tensor.stride(), tensor.dtype
