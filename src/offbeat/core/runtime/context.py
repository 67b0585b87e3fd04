"""Context of rules at run time: the storage of one rank as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.buckets.shards import local_of, squared_norm
from offbeat.core.plan import Apply
from offbeat.core.plan.types import moment_of
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.updates import Updates


class StorageContext:
    """Storage of one rank, as rules read and write it; `iteration` is the iteration of the rule."""

    def __init__(
        self,
        rank: int,
        flat: Flat,
        gradients: Gradients,
        state: StateStore,
        updates: Updates,
    ):
        self.rank = rank
        self.iteration: Iteration | None = None
        self._flat, self._gradients, self._state, self._updates = flat, gradients, state, updates
        self._memory: dict[str, Any] = {}

    def read(self, buffer: str, buckets: range, age: int = 0) -> tuple[Tensor, ...]:
        moment = moment_of(buffer)
        if buffer == "state" or moment is not None:
            return self._state.tensors(buckets, moment)
        return self._flat.tensors(buffer, buckets, self._flat.copy_index(buffer, age))

    write = read

    def parameters(self, buffer: str, buckets: range) -> tuple[Tensor, ...]:
        return tuple(self._flat.parameters_of(buffer, buckets))

    def squared_norm(self, buffer: str, buckets: range) -> Tensor | float:
        tensors = self._values(buffer, buckets)
        if self._flat.is_sharded:
            return squared_norm(tensors, self._flat.parameters[0])
        return sum(torch.linalg.vector_norm(t).double().square() for t in tensors)

    def scale(self, buffer: str, buckets: range, factor: float) -> None:
        for tensor in self._values(buffer, buckets):
            tensor *= factor

    def _values(self, buffer: str, buckets: range) -> tuple[Tensor, ...]:
        """Return the tensors of a buffer without the values that are appended to gradients."""
        if buffer != "grad":
            return self.read(buffer, buckets)
        copy = self._flat.copy_index(buffer)
        if self._flat.is_sharded:
            gradients = self._gradients.gradient_tensors(buckets, copy)
            return tuple(local_of(gradient) for gradient in gradients)
        return tuple(self._flat.gradients(b, copy) for b in buckets)

    def swap(self, a: str, b: str, buckets: range) -> None:
        for one, other in zip(
            self._flat.parameters_of(a, buckets), self._flat.parameters_of(b, buckets), strict=True
        ):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    def rotate(self, buffer: str) -> None:
        self._flat.rotate(buffer)

    def local(self, apply: Apply) -> None:
        assert self.iteration is not None
        self._updates.local(apply, self.iteration)

    def reset(self, buckets: range) -> None:
        self._state.reset(buckets)

    def recall(self, name: str) -> Any:
        return self._memory.get(name)

    def keep(self, name: str, value: Any) -> None:
        self._memory[name] = value

    @property
    def memory(self) -> dict[str, Any]:
        """All values that rules have kept, by name."""
        return self._memory

    def show(self, name: str, numbers: Mapping[str, float]) -> None:
        assert self.iteration is not None
        self.iteration.shown[name] = numbers
