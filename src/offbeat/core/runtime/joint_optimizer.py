"""Several optimizers of one model as one, for everything that asks for the model's optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class JointOptimizer(torch.optim.Optimizer):
    """The param groups and the state of several optimizers, which stay the owners of both.

    A step of it steps all of them. Checkpoints number parameters through all of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        self.parts = list(parts)
        self.gather()

    def gather(self) -> None:
        """Have the groups and states that the optimizers have now."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = _States(self.parts)  # type: ignore[assignment]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every optimizer."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        groups, first = list(state_dict["param_groups"]), 0
        for part in self.parts:
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            count = sum(len(group["params"]) for group in mine)
            numbers = range(first, first + count)
            state = {n: s for n, s in state_dict["state"].items() if n in numbers}
            part.load_state_dict({"state": state, "param_groups": mine})
            first += count
        self.gather()


class _States(MutableMapping[Tensor, State]):
    """The state of every parameter, where its optimizer has it."""

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
        """The state of a parameter, without making one."""
        owner = self._owner.get(id(p))
        return default if owner is None else owner.state.get(p, default)

    def pop(self, p: Tensor, default: Any = None) -> Any:  # type: ignore[override]
        """Remove the state of a parameter."""
        owner = self._owner.get(id(p))
        return default if owner is None else owner.state.pop(p, default)

    def __iter__(self) -> Iterator[Tensor]:
        return (p for part in self._parts for p in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def require_disjoint(model: nn.Module, parts: Sequence[torch.optim.Optimizer]) -> None:
    """ValueError if a parameter has several of these optimizers."""
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
