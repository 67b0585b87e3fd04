"""Stage of a model on one device: parameter versions, gradient sum, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.transport import packed
from offbeat.cyclic.state import StageState
from offbeat.cyclic.vectors import Shape, Vectors
from offbeat.cyclic.versions import Contents


class Stage:
    """Trained parameters of a module, in several versions, with gradients and optimizer state.

    Version t are the parameters at the start of iteration t. The module's own parameters are those
    of the newest local version, or empty without local versions. `moves`: the stage moves between
    devices with its optimizer state.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, moves: bool):
        self.module = module
        self._optimizer = optimizer
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in self.trained.items()}
        self._places = [  # dictionaries that hold the parameters; tied ones have several
            (owner._parameters, key, names[id(p)])
            for owner in module.modules()
            for key, p in owner._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._shapes = {name: Shape.of(p) for name, p in self.trained.items()}
        self.versions: dict[int, Vectors] = {}
        self.sum: Vectors | None = None
        self.state = StageState(optimizer, self.trained, self._shapes) if moves else None
        # Versions in autograd graphs: a version that returns must occupy the same memory again.
        self._in_graphs: WeakValueDictionary[int, Vectors] = WeakValueDictionary()

    @property
    def newest(self) -> int:
        """Number of the newest local version."""
        return max(self.versions)

    @property
    def nbytes(self) -> int:
        """Local bytes of parameters, gradients and optimizer state."""
        vectors = [*self.all_versions(), *([self.sum] if self.sum else [])]
        state = [
            value.nbytes
            for p in self.trained.values()
            for value in self._optimizer.state.get(p, {}).values()
            if isinstance(value, Tensor)
        ]
        return sum(one.nbytes for one in vectors) + sum(state)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self._shapes.values())).device

    def all_versions(self) -> Iterable[Vectors]:
        """Return all local versions, also those only in autograd graphs."""
        return {id(v): v for v in [*self.versions.values(), *self._in_graphs.values()]}.values()

    def begin(self, number: int) -> None:
        """Make the module's current parameters the only version."""
        self.versions = {number: self.new_vectors()}
        for name, view in self.versions[number].views.items():
            view.data.copy_(self.trained[name].data)
        self._attach_version(number)

    def new_vectors(self) -> Vectors:
        """Return new tensors of the parameters' shapes, for parameters or gradients."""
        return Vectors(self._shapes)

    def forward(self, x: Tensor, number: int) -> Any:
        """Call the module with a version of its parameters, whose `views` are leaves of the graph.

        While the graph is needed, the caller must hold a reference to the version.
        """
        self._in_graphs[number] = self.versions[number]
        leaves = self.versions[number].views
        # torch.func.functional_call does the same, but searches the modules at each call.
        for owner, key, name in self._places:
            owner[key] = leaves[name].requires_grad_()  # type: ignore[assignment]
        try:
            return self.module(x)
        finally:
            for owner, key, name in self._places:
                owner[key] = self.trained[name]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of `views`, to the sum."""
        if self.sum is None:
            self.sum = self.new_vectors()
        pairs = zip(self.sum.views.values(), gradients, strict=True)
        given = [pair for pair in pairs if pair[1] is not None]
        if given:
            torch._foreach_add_(*map(list, zip(*given, strict=True)))

    def begin_update(self, number: int, gradient: Vectors) -> None:
        """Copy the version before `number` and attach the copy and `gradient` to the module.

        The optimizer updates the copy. Pending forwards and backwards use the old version.
        """
        self.versions[number] = self.versions[number - 1].copy()
        self._attach_version(number)
        for name, p in self.trained.items():
            p.grad = gradient.views[name]

    def end_update(self) -> None:
        """Remove the gradients from the module after the optimizer's step."""
        for p in self.trained.values():
            p.grad = None

    def keep_versions(self, numbers: Iterable[int]) -> None:
        """Remove all versions except these and the newest one."""
        kept = {*numbers, self.newest}
        self.versions = {n: v for n, v in self.versions.items() if n in kept}

    def _attach_version(self, number: int) -> None:
        for name, p in self.trained.items():
            p.data = self.versions[number].views[name].data

    # ---- moves between devices --------------------------------------------------------------

    def expect(self, there: Contents) -> list[Tensor]:
        """Allocate what will be received. Return its flat tensors."""
        for number in there.versions:
            self.versions[number] = self._in_graphs.get(number) or self.new_vectors()
            self.versions[number].allocate()
        if there.summing:
            self.sum = self.new_vectors()
        if self.state and there.stateful:
            self.state.allocate()
        return self._flats(there)

    def activate(self) -> None:
        """Give the module and the optimizer what has been received."""
        self._attach_version(self.newest)
        if self.state:
            self.state.restore_state()

    def unload(self, there: Contents) -> tuple[list[Tensor], Callable[[], None]]:
        """Remove the stage from this device.

        Returns its flat tensors, and a callback for the end of the send, which frees their memory.
        """
        if self.state and there.stateful:
            self.state.export_state()
        tensors, left = self._flats(there), [self.versions[number] for number in there.versions]
        self.remove_tensors()

        def release_versions() -> None:
            for version in left:
                version.release()

        return tensors, release_versions

    def _flats(self, there: Contents) -> list[Tensor]:
        """Return the flat tensors of a transfer, in the order in which they are sent."""
        state = self.state.memory if self.state and there.stateful else None
        parts = [self.versions[number] for number in there.versions]
        parts += [part for part in (self.sum if there.summing else None, state) if part]
        return [flat for part in parts for flat in part.flats]

    def remove_tensors(self) -> None:
        """Remove all local tensors of the stage, except versions in autograd graphs."""
        self.versions, self.sum = {}, None
        for p in self.trained.values():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
            self._optimizer.state.pop(p, None)
        if self.state:
            self.state.memory = None

    def broadcast_newest(self, owner: int, number: int, group: dist.ProcessGroup) -> None:
        """Broadcast the newest version and the optimizer state from the owner to all ranks."""
        mine = dist.get_rank() == owner
        if not self.versions:
            self.versions[number] = self.new_vectors()
        for flat in self.versions[self.newest].flats:
            dist.broadcast(flat, owner, group)
        state = [self._optimizer.state.get(p, {}) if mine else None for p in self.trained.values()]
        state = packed.broadcast_state(state, owner, group, self.device)
        self._attach_version(self.newest)
        for p, given in zip(self.trained.values(), state, strict=True):
            if given and not mine:
                self._optimizer.state[p] = given
