"""Check for parameters that are added, unfrozen or moved to other memory after `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import TypeVar

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from offbeat.core.buckets.layout import Key, key_of
from offbeat.core.buckets.shards import reshard

T = TypeVar("T")
_address = methodcaller("data_ptr")
REMEDY = (
    "it has no place on the other ranks, so it would never be averaged; change the model before "
    "offbeat.prepare, or call model.close() and prepare model.module again"
)
ELSEWHERE = (
    "share_memory(), a queue of torch.multiprocessing, to() and `p.data = ...` do that, and values "
    "from other ranks would no longer reach it; write values by `p.data.copy_(...)`, give copies "
    "to other processes, and move the model before offbeat.prepare"
)


LOOKS = 64  # parameters that are checked at each forward


class ParameterWatch:
    """Detects parameters that were unfrozen, added, replaced or moved since `attach`.

    Each forward checks at most `LOOKS` parameters in turn. So a change of all parameters is
    detected in the next forward, and a change of one parameter within a few iterations. A frozen
    parameter is allowed: it counts as unused.

    torch has registration hooks for the whole process only. They record that a parameter or module
    was registered, also in other modules, which may be inserted into the model later without a
    hook. Modules of the model that are registered again, as in the list that a slice of a list of
    layers makes, are not recorded. `act` is called when a trained parameter is registered again, as
    pruning does before it reads the parameter.
    """

    def __init__(self, model: nn.Module, act: Callable[[], None] = lambda: None):
        self._model, self._act = model, act
        self._registered = False
        self._modules = {*map(id, model.modules())}
        self._handles = [
            register_module_parameter_registration_hook(self._note_parameter),
            register_module_module_registration_hook(self._note_module),
        ]
        self._turn = 0
        self._trained: set[int] = set()
        self._frozen: list[nn.Parameter] = []
        self._placed: list[nn.Parameter] = []
        self._places: list[int] = []
        self._keys: list[Key] = []

    def attach(self, trained: Iterable[nn.Parameter], placed: bool = True) -> None:
        """Set the trained parameters.

        Args:
            trained: parameters that exist on all ranks.
            placed: whether they must also keep their memory.
        """
        trained = [*trained]
        self._placed = trained if placed else []
        self._places = [*map(_address, self._placed)]
        self._keys = [*map(key_of, self._placed)]
        self._trained = {id(p) for p in trained}
        self._note_frozen()

    def require_unchanged(self, *, may_move: bool = False) -> None:
        """Require that no parameter was added, unfrozen or moved.

        Args:
            may_move: whether parameters may be in other memory of the same dtype and device, as
                after `p.data = ...`, because no message contains them.

        Raises:
            ValueError: names the first parameter that has changed.
        """
        state_of, known = (key_of, self._keys) if may_move else (_address, self._places)
        if [*map(state_of, self._select(self._placed))] != self._select(known):
            placed = zip(self._placed, known, strict=True)
            moved = next(p for p, before in placed if state_of(p) != before)
            name = next((n for n, p in self._model.named_parameters() if p is moved), "?")
            raise ValueError(f"parameter {name!r} was moved to other memory: {ELSEWHERE}")
        self._turn += 1
        if not self._registered and not any(p.requires_grad for p in self._select(self._frozen)):
            return
        self._registered = False
        reshard(self._model)
        known = {id(p) for p in self._frozen}
        for name, p in self._model.named_parameters():
            if not isinstance(p, nn.Parameter):  # functional_call replaces it for one forward
                self._registered = True
            elif p.requires_grad and id(p) not in self._trained:
                what = "unfrozen" if id(p) in known else "added"
                raise ValueError(f"parameter {name!r} was {what} after offbeat.prepare: {REMEDY}")
        self._note_frozen()

    def _note_frozen(self) -> None:
        reshard(self._model)
        self._modules = {*map(id, self._model.modules())}
        others = (p for p in self._model.parameters() if id(p) not in self._trained)
        self._frozen = [p for p in others if isinstance(p, nn.Parameter)]

    def _select(self, several: Sequence[T]) -> Sequence[T]:
        """Return the part of the sequence to check in this forward."""
        if len(several) <= LOOKS:
            return several
        start = self._turn * LOOKS % len(several)
        return several[start : start + LOOKS]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _note_parameter(self, _module: nn.Module, _name: str, p: nn.Parameter) -> None:
        self._registered = True
        if id(p) in self._trained:
            self._act()

    def _note_module(self, _module: nn.Module, _name: str, added: nn.Module) -> None:
        if id(added) not in self._modules:
            self._registered = True
