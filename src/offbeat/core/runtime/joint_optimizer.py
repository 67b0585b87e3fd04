"""Joint optimizer: several optimizers of one model behind the interface of one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class JointOptimizer(torch.optim.Optimizer):
    """Optimizer that exposes the param groups and the state of several optimizers, which keep them.

    A step calls `step` of each optimizer. Checkpoints number the parameters across all optimizers.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        self.parts = list(parts)
        self.gather()

    def gather(self) -> None:
        """Refresh the groups and states from the optimizers."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = _States(self.parts)  # type: ignore[assignment]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Call `step` of each optimizer."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that `state_dict` has returned."""
        groups, first = list(state_dict["param_groups"]), 0
        for part in self.parts:
            own_groups, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            count = sum(len(group["params"]) for group in own_groups)
            numbers = range(first, first + count)
            state = {n: s for n, s in state_dict["state"].items() if n in numbers}
            part.load_state_dict({"state": state, "param_groups": own_groups})
            first += count
        self.gather()


class _States(MutableMapping[Tensor, State]):
    """State by parameter, read from and written to the optimizer of the parameter."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self._parts = parts
        self._owner = {
            id(p): part for part in parts for group in part.param_groups for p in group["params"]
        }

    def __getitem__(self, p: Tensor) -> State:
        return self._owner[id(p)].state[p]

    def __setitem__(self, p: Tensor, state: State) -> None:
        self._owner[id(p)].state[p] = state

    def __delitem__(self, p: Tensor) -> None:
        del self._owner[id(p)].state[p]

    def __contains__(self, p: object) -> bool:
        owner = self._owner.get(id(p))
        return owner is not None and p in owner.state

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, without creating one."""
        owner = self._owner.get(id(p))
        return default if owner is None else owner.state.get(p, default)

    def pop(self, p: Tensor, default: Any = None) -> Any:  # type: ignore[override]
        """Remove and return the state of a parameter."""
        owner = self._owner.get(id(p))
        return default if owner is None else owner.state.pop(p, default)

    def __iter__(self) -> Iterator[Tensor]:
        return (p for part in self._parts for p in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def require_disjoint(model: nn.Module, parts: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError if a parameter belongs to several of the optimizers."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    seen: dict[int, int] = {}
    for number, part in enumerate(parts):
        for p in (p for group in part.param_groups for p in group["params"]):
            before = seen.setdefault(id(p), number)
            if before != number:
                raise ValueError(
                    f"optimizers {before} and {number} both have parameter "
                    f"{name_of.get(id(p), '?')!r}; give each parameter to one optimizer"
                )
