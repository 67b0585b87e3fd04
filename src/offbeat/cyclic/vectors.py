"""Named tensors of given shapes in flat memory that can be released and allocated again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.core.buckets.flat import view_like


class Shape(NamedTuple):
    """Shape, strides and dtype of a tensor, as a tensor on the meta device, and its device."""

    like: Tensor
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(torch.empty_like(tensor, device="meta", requires_grad=False), tensor.device)


class Vectors:
    """Named tensors as views of one flat tensor per dtype and device, zero at first.

    Views have version counters of their own, so autograd does not detect writes to `flats`.
    """

    def __init__(self, shapes: Mapping[Any, Shape]):
        self._shapes = shapes
        homes: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
        for name, shape in shapes.items():
            homes.setdefault((shape.like.dtype, shape.device), []).append(name)
        self.flats: list[Tensor] = []
        self.views: dict[Any, Tensor] = {}
        for (dtype, device), names in homes.items():
            size = sum(shapes[name].like.numel() for name in names)
            flat, at = torch.zeros(size, dtype=dtype, device=device), 0
            self.flats.append(flat)
            for name in names:
                self.views[name] = view_like(flat.data, shapes[name].like, at)
                at += shapes[name].like.numel()

    def copy(self) -> Vectors:
        """Return a copy in new memory."""
        made = Vectors(self._shapes)
        for copied, flat in zip(made.flats, self.flats, strict=True):
            copied.copy_(flat)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of allocated memory."""
        return sum(flat.untyped_storage().nbytes() for flat in self.flats)

    def release(self) -> None:
        """Free the memory. Views must not be read before `allocate`."""
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate memory after `release`, uninitialized. Saved views in graphs refer to it."""
        for flat in self.flats:
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
