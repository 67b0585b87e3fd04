"""Optimizer state of one stage in one block of memory per device, for transfers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import shield_parameters, trial_copy
from offbeat.core.buckets.flat import ALIGNED_BYTES, align, with_own_storage
from offbeat.core.buckets.random_states import preserve_random_states
from offbeat.cyclic.vectors import Shape

_TRIAL = (2, 3)


class _Place(NamedTuple):
    parameter: nn.Parameter
    name: str
    number: type | None  # type of a value that is not a tensor
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    begin: int
    end: int


class StageState:
    """Optimizer state of some parameters: tensors of a parameter's shape, scalars and numbers.

    The layout is determined with trial parameters, so it is available before the first step. Raises
    ValueError for values of another kind.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Shape],
    ):
        self._optimizer, self._parameters = optimizer, list(parameters.values())
        self._places: list[_Place] = []
        self._sizes: dict[torch.device, int] = {}
        group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for name, p in parameters.items():
            if id(p) in group_of:
                self._reserve(p, shapes[name], group_of[id(p)])
        self._memory: dict[torch.device, Tensor] = {}
        self._views: list[Tensor] = []

    @property
    def is_present(self) -> bool:
        """Whether the optimizer has state of these parameters."""
        return any(p in self._optimizer.state for p in self._parameters)

    def export_state(self) -> list[Tensor]:
        """Remove the state from the optimizer and return it as bytes, one tensor per device."""
        memory = [*self._memory.values()] or self.allocate_memory()
        for place, view in zip(self._places, self._views, strict=True):
            value = self._optimizer.state[place.parameter][place.name]
            if value is not view:
                view.copy_(
                    torch.as_tensor(value, dtype=place.dtype, device=view.device).view(place.shape)
                )
        self.clear_state()
        return memory

    def allocate_memory(self) -> list[Tensor]:
        """Allocate memory for the state and return it, one tensor per device."""
        self._memory = {
            device: torch.zeros(size, dtype=torch.uint8, device=device)
            for device, size in self._sizes.items()
        }
        self._views = [self._view(place) for place in self._places]
        return [*self._memory.values()]

    def _view(self, place: _Place) -> Tensor:
        """Return a view with a storage of its own: torch.save rejects two dtypes in one storage."""
        part = self._memory[place.device][place.begin : place.end]
        alone = with_own_storage(part) if part.numel() else part
        return alone.view(place.dtype).view(place.shape)

    def restore_state(self) -> None:
        """Give the optimizer the state that was received into `allocate_memory`."""
        for place, view in zip(self._places, self._views, strict=True):
            value = view if place.number is None else place.number(view.item())
            self._optimizer.state[place.parameter][place.name] = value

    def clear_state(self) -> None:
        """Remove the state and its memory."""
        self._memory, self._views = {}, []
        for p in self._parameters:
            self._optimizer.state.pop(p, None)

    def _reserve(self, p: nn.Parameter, shape: Shape, group: dict[str, Any]) -> None:
        trial = nn.Parameter(torch.zeros(_TRIAL, dtype=p.dtype, device=shape.device))
        trial.grad = torch.zeros_like(trial)
        copy = trial_copy(self._optimizer, [{**group, "params": [trial]}])
        with preserve_random_states({shape.device}), shield_parameters(self._optimizer):
            copy.step()
        for name, value in copy.state[trial].items():
            number, like, device = None, value, shape.device
            if isinstance(value, (bool, int, float)):
                number, like = type(value), torch.empty((), dtype=torch.float64, device="cpu")
                device = like.device
            elif isinstance(value, Tensor) and value.shape == trial.shape:
                like = torch.empty_like(shape.like, dtype=value.dtype)
            elif isinstance(value, Tensor) and value.dim() == 0:
                device = value.device
            elif value is None:
                continue
            else:
                raise ValueError(
                    f"{type(self._optimizer).__name__} keeps {name!r} for a parameter, neither a "
                    "number nor a tensor of its shape, which cannot be sent; use another placement "
                    "than 'zero'"
                )
            begin = align(self._sizes.get(device, 0), ALIGNED_BYTES)
            self._sizes[device] = end = begin + like.nbytes
            place = _Place(p, name, number, like.dtype, like.shape, device, begin, end)
            self._places.append(place)
