"""What a model's forwards keep for backward, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.measuring.activations import Activations

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


class ForwardMemory:
    """Measures forwards within `forward()` until `close`; `place` is the module that runs now.

    `kept` are the bytes per place at the end of the forward after which the most was kept; None if
    that cannot be known. It cannot where the caller, or a part of the model, uses saved-tensor
    hooks in a way that leaves no room for others: then training goes on without them.

    Bytes are those of tensors that autograd saves, each storage once, where it was saved first.
    What somebody saves through hooks of his own within the model (checkpointing does) is his.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._open, self._known = model, True, True
        self._meter: _ByPlace | None = None
        self._kept: Mapping[str, int] = {}
        self.place = ""

    @property
    def kept_bytes(self) -> Mapping[str, int] | None:
        """Bytes per place, or None."""
        return self._kept if self._known else None

    @property
    def is_complete(self) -> bool:
        """Whether a forward was measured, or cannot be."""
        return self._meter is not None or not self._known

    def close(self) -> None:
        """Measure no more."""
        self._open, self._meter = False, None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of the model."""
        if not (self._open and self._known and self._model.training and torch.is_grad_enabled()):
            yield
            return
        if not _room():
            self._known = False
            yield
            return
        self._meter = self._meter or _ByPlace(_one_of_each_storage(self._model), self)
        self.place = ""
        with self._unless_in_the_way(self._meter):
            yield
        self._known = self._known and not self._meter.missed
        if self._meter.live_bytes > sum(self._kept.values()):
            self._kept = self._meter.by_place()

    @contextmanager
    def _unless_in_the_way(self, meter: Activations) -> Iterator[None]:
        """The meter's hooks; gone as soon as somebody asks for none at all, as `torch.func` does,
        which fails if there are some."""
        pushed, disable = True, _autograd._saved_tensors_hooks_disable

        def give_way(*args: Any, **kwargs: Any) -> None:
            nonlocal pushed
            if pushed and _top() == hooks:
                _autograd._pop_saved_tensors_default_hooks()
                pushed = self._known = False
            disable(*args, **kwargs)

        # A compiler that sees the model run must not compile these.
        hooks = torch.compiler.disable(meter.pack), torch.compiler.disable(meter.unpack)
        _autograd._push_saved_tensors_default_hooks(*hooks)
        _autograd._saved_tensors_hooks_disable = give_way
        try:
            yield
        finally:
            _autograd._saved_tensors_hooks_disable = disable
            if pushed:
                self._known = _remove(hooks) and self._known


class _ByPlace(Activations):
    """Knows for every storage where it was saved first."""

    def __init__(self, held: Iterable[Tensor], memory: ForwardMemory) -> None:
        super().__init__(lambda: held)
        self._memory = memory
        self._places: dict[int, str] = {}

    def by_place(self) -> Mapping[str, int]:
        """What is kept now."""
        found: Counter[str] = Counter()
        for key, place in self._places.items():
            found[place] += self._bytes[key]
        return found

    def begins(self, key: int, size_bytes: int) -> None:
        super().begins(key, size_bytes)
        self._places[key] = self._memory.place

    def ends(self, key: int) -> None:
        super().ends(key)
        del self._places[key]


def _top() -> Any:
    """The hooks in effect, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _remove(hooks: tuple[Any, Any]) -> bool:
    """Take hooks away from under any that were left over them; whether there were none."""
    above = []
    while (top := _top()) is not None and top != hooks:
        above.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    _autograd._pop_saved_tensors_default_hooks()
    for other in reversed(above):
        _autograd._push_saved_tensors_default_hooks(*other)
    return not above


def _room() -> bool:
    """Whether hooks may be used, and nobody's would be hidden by ours."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is None and _top() is None


def _one_of_each_storage(model: nn.Module) -> list[Tensor]:
    """Of parameters and buffers, which exist anyway; most share one storage."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with suppress(RuntimeError, NotImplementedError):  # sparse: has none
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return [*found.values()]
