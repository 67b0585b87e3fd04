"""Optimizer state of one stage in flat memory, for transfers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import trial_copy, trial_steps
from offbeat.cyclic.vectors import Shape, Vectors

_TRIAL = (2, 3)


class StageState:
    """Optimizer state of some parameters: tensors of a parameter's shape, scalars and numbers.

    The layout is determined with trial parameters, so it is available before the first step. Raises
    ValueError for values of another kind.

    Attributes:
        memory: the values while the state is on its way to this device or has come from another
            one, by (name of the parameter, name of the value); None otherwise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Shape],
    ):
        self._optimizer, self._parameters = optimizer, parameters
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._numbers: dict[tuple[str, str], type] = {}  # types of values that are not tensors
        self.memory: Vectors | None = None
        group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for name, p in parameters.items():
            if id(p) in group_of:
                self._find_layout(name, shapes[name], group_of[id(p)])

    def allocate(self) -> Vectors:
        """Allocate the memory of the state."""
        self.memory = Vectors(self._shapes)
        return self.memory

    def export_state(self) -> None:
        """Copy the optimizer's state into the memory."""
        memory = self.memory or self.allocate()
        for (parameter, name), view in memory.views.items():
            value = self._optimizer.state[self._parameters[parameter]][name]
            if value is not view:
                view.copy_(torch.as_tensor(value, dtype=view.dtype, device=view.device))

    def restore_state(self) -> None:
        """Give the optimizer the state that was received into the memory, if any was."""
        for key, view in self.memory.views.items() if self.memory else ():
            value = self._numbers[key](view.item()) if key in self._numbers else view
            self._optimizer.state[self._parameters[key[0]]][key[1]] = value

    def _find_layout(self, parameter: str, shape: Shape, group: dict[str, Any]) -> None:
        trial = nn.Parameter(torch.zeros(_TRIAL, dtype=shape.like.dtype, device=shape.device))
        trial.grad = torch.zeros_like(trial)
        copy = trial_copy(self._optimizer, [{**group, "params": [trial]}])
        with trial_steps(self._optimizer):
            copy.step()
        for name, value in copy.state[trial].items():
            key = parameter, name
            if isinstance(value, (bool, int, float)):
                self._numbers[key] = type(value)
                self._shapes[key] = Shape.of(torch.empty((), dtype=torch.float64, device="cpu"))
            elif isinstance(value, Tensor) and value.shape == trial.shape:
                like = torch.empty_like(shape.like, dtype=value.dtype)
                self._shapes[key] = Shape(like, shape.device)
            elif isinstance(value, Tensor) and value.dim() == 0:
                self._shapes[key] = Shape.of(value)
            elif value is not None:
                raise ValueError(
                    f"{type(self._optimizer).__name__} keeps {name!r} for a parameter, neither a "
                    "number nor a tensor of its shape, which cannot be sent; use another placement "
                    "than 'zero'"
                )
