"""Vectors: tensors of given shapes on flat memory, which can be given back and come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.buckets.flat import view_like


class Shape(NamedTuple):
    """What a tensor looks like: one without memory (on the meta device), and where it is."""

    like: Tensor
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(torch.empty_like(tensor, device="meta", requires_grad=False), tensor.device)


class Vectors:
    """Tensors by name, as views of one flat tensor per dtype and device; zero at first.

    Views have version counters of their own: what is written to `flats` is invisible to autograd.
    """

    def __init__(self, shapes: Mapping[str, Shape]):
        self._shapes = shapes
        homes: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, shape in shapes.items():
            homes.setdefault((shape.like.dtype, shape.device), []).append(name)
        self.flats: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        for (dtype, device), names in homes.items():
            size = sum(shapes[name].like.numel() for name in names)
            flat, at = torch.zeros(size, dtype=dtype, device=device), 0
            self.flats.append(flat)
            for name in names:
                self.views[name] = view_like(flat.data, shapes[name].like, at)
                at += shapes[name].like.numel()

    def copy(self) -> Vectors:
        """The same numbers in new memory."""
        made = Vectors(self._shapes)
        made.fill(self.flats)
        return made

    def fill(self, flats: Sequence[Tensor]) -> None:
        """Take over these numbers."""
        for mine, theirs in zip(self.flats, flats, strict=True):
            mine.copy_(theirs)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has now."""
        return sum(flat.untyped_storage().nbytes() for flat in self.flats)

    def release(self) -> None:
        """Give the memory back; views must not be read until `allocate`."""
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Have memory again, of any content; graphs that have saved the views find it there."""
        for flat in self.flats:
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
