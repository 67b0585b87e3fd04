"""A stage on one device: versions of its parameters, sum of its gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.transport import packed
from offbeat.cyclic.state import StageState
from offbeat.cyclic.vectors import Shape, Vectors


class Stage:
    """What is trained of a module. Version t are the parameters that iteration t begins with.

    The module's own parameters are those of the newest version that is here; without any they are
    empty.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self.module = module
        self._optimizer = optimizer
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in self.trained.items()}
        self._places = [  # where the module looks for them; tied ones have several
            (owner._parameters, key, names[id(p)])
            for owner in module.modules()
            for key, p in owner._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._shapes = {name: Shape.of(p) for name, p in self.trained.items()}
        self.versions: dict[int, Vectors] = {}
        self.sum: Vectors | None = None
        self._state: StageState | None = None
        # Those in graphs of micro-batches under way: they must come back into the same memory.
        self._in_graphs: WeakValueDictionary[int, Vectors] = WeakValueDictionary()

    @property
    def newest(self) -> int:
        """Number of the newest version that is here."""
        return max(self.versions)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that are here."""
        held = {id(version): version.nbytes for version in self._known()}
        gradients = self.sum.nbytes if self.sum is not None else 0
        state = sum(
            value.nbytes
            for p in self.trained.values()
            for value in self._optimizer.state.get(p, {}).values()
            if isinstance(value, Tensor)
        )
        return sum(held.values()) + gradients + state

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return next(iter(self._shapes.values())).device

    def held(self) -> Iterator[Tensor]:
        """Parameters of all versions, flat."""
        for version in {id(v): v for v in self._known()}.values():
            yield from version.flats

    def _known(self) -> list[Vectors]:
        return [*self.versions.values(), *self._in_graphs.values()]

    def begin(self, number: int) -> None:
        """The module's parameters as they are now are the only version."""
        self.versions = {number: self.vectors()}
        for name, view in self.versions[number].views.items():
            view.data.copy_(self.trained[name].data)
        self._show(number)

    def vectors(self) -> Vectors:
        """Room for the parameters, or for their gradients."""
        return Vectors(self._shapes)

    def forward(self, x: Tensor, number: int) -> tuple[Any, dict[str, Tensor]]:
        """What the module returns with a version of its parameters, and these, for a backward that
        asks for their gradients. Whoever keeps the graph must keep the version, too."""
        self._in_graphs[number] = self.versions[number]
        leaves = self.versions[number].views
        # As torch.func.functional_call does, which looks for the places anew each time.
        for owner, key, name in self._places:
            owner[key] = leaves[name].requires_grad_()  # type: ignore[assignment]
        try:
            return self.module(x), leaves
        finally:
            for owner, key, name in self._places:
                owner[key] = self.trained[name]

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Gradients of one micro-batch, in the order of `trained`."""
        if self.sum is None:
            self.sum = self.vectors()
        pairs = zip(self.sum.views.values(), found, strict=True)
        given = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if given:
            torch._foreach_add_(*map(list, zip(*given, strict=True)))

    def begin_update(self, number: int, gradient: Vectors) -> None:
        """A new version in new memory, as forwards and backwards may need the old one; the
        optimizer finds it, with its gradients, in the module's parameters."""
        self.versions[number] = self.versions[number - 1].copy()
        self._show(number)
        for name, p in self.trained.items():
            p.grad = gradient.views[name]

    def end_update(self) -> None:
        """The optimizer has stepped."""
        for p in self.trained.values():
            p.grad = None

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all other versions but the newest."""
        kept = {*numbers, self.newest}
        self.versions = {n: v for n, v in self.versions.items() if n in kept}

    def _show(self, number: int) -> None:
        for name, p in self.trained.items():
            p.data = self.versions[number].views[name].data

    # ---- travelling -------------------------------------------------------------------------

    @property
    def state(self) -> StageState:
        """The optimizer's state of this stage."""
        if self._state is None:
            self._state = StageState(self._optimizer, self.trained, self._shapes)
        return self._state

    def arrive(self, numbers: Iterable[int]) -> list[Tensor]:
        """Room for versions that are about to come, as flat tensors."""
        for number in numbers:
            version = self._in_graphs.get(number)
            if version is None:
                version = self.vectors()
            version.allocate()
            self.versions[number] = version
        return [flat for number in numbers for flat in self.versions[number].flats]

    def leave(self) -> None:
        """Nothing of it is here any more, but what graphs hold."""
        self.versions, self.sum = {}, None
        for p in self.trained.values():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
            self._optimizer.state.pop(p, None)

    def show_newest(self) -> None:
        """The module's parameters are those of the newest version."""
        self._show(self.newest)

    def receive_from(self, rank: int, group: dist.ProcessGroup) -> None:
        """The weights and buffers of one rank on all."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if tensor.numel():
                dist.broadcast(tensor.data, rank, group)

    def share(self, owner: int, number: int, group: dist.ProcessGroup) -> None:
        """The owner's version and state on all ranks."""
        mine = dist.get_rank() == owner
        if not self.versions:
            self.arrive([number])
        for flat in self.versions[self.newest].flats:
            dist.broadcast(flat, owner, group)
        state = [self._optimizer.state.get(p, {}) if mine else None for p in self.trained.values()]
        state = packed.broadcast_state(state, owner, group)
        self.show_newest()
        for p, given in zip(self.trained.values(), state, strict=True):
            if given and not mine:
                self._optimizer.state[p] = given
