"""Frozen values: copies of values as pickles, with their tensors separate and on the host."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.shards import local_of

TensorLayout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Frozen:
    """A copy of a value: its `pickle`, and its `tensors` by name.

    `looks` gives shape, strides and dtype of each tensor. A tensor that occurs several times, such
    as tied weights, is stored once.
    """

    pickle: bytes
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def looks(self) -> dict[str, TensorLayout]:
        return {name: (t.size(), t.stride(), t.dtype) for name, t in self.tensors.items()}

    def thaw(self) -> Any:
        """Return the value, with `tensors` in their places."""
        return _Unpickler(self.pickle, self.tensors).load()


def freeze(value: Any, names: Mapping[str, Tensor]) -> Frozen:
    """Return a frozen copy of `value`.

    Args:
        value: value to copy. It may be changed afterwards.
        names: tensors by name. All other tensors are numbered.

    Raises:
        ValueError: the value cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, {_key_of(tensor): name for name, tensor in reversed([*names.items()])})
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"extra holds something that cannot be saved: {error}; give values that pickle, or "
            "objects with state_dict() and load_state_dict()"
        ) from error
    return Frozen(file.getvalue(), pickler.tensors)


def empty(look: TensorLayout) -> Tensor:
    """Return an uninitialized tensor of this shape, strides and dtype on the host."""
    size, stride, dtype = look
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[Any, str]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names, self._seen = names, dict[Any, str]()
        self.tensors: dict[str, Tensor] = {}
        self._alive: list[Tensor] = []  # references, so that no address is reused while pickling

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        obj = local_of(obj)
        place = _key_of(obj)
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

    def persistent_load(self, pid: str) -> Tensor:
        return self._tensors[pid]


def _key_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory, shape, strides and dtype.

    Each empty tensor has its own key.
    """
    tensor = local_of(tensor)
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.size(), tensor.stride(), tensor.dtype
