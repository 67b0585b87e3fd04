"""Measurement of the bytes that a model's forwards save for backward, by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.measuring.kept_activations import Activations

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


class ForwardMemory:
    """Measures forwards within `forward()` until `close`.

    `place` is the name of the module that runs now. The result is `activation_bytes`, of the
    forward after which most bytes were saved. It is None if the caller, or a part of the model,
    uses saved-tensor hooks that exclude other hooks. In that case training continues without a
    result.

    Bytes are those of tensors that autograd saves. Each storage counts once, for the module that
    saved it first. Tensors that other hooks within the model save, as in activation checkpointing,
    do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._open, self._known = model, True, True
        self._meter: _BytesByModule | None = None
        self._kept: Mapping[str, int] = {}
        self.place = ""

    @property
    def activation_bytes(self) -> Mapping[str, int] | None:
        """Bytes per module name, or None."""
        return self._kept if self._known else None

    @property
    def is_complete(self) -> bool:
        """Whether a forward was measured, or cannot be measured."""
        return self._meter is not None or not self._known

    def close(self) -> None:
        """Stop measuring."""
        self._open, self._meter = False, None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure one forward of the model, which runs in the block."""
        if not (self._open and self._known and self._model.training and torch.is_grad_enabled()):
            yield
            return
        if not _can_push_hooks():
            self._known = False
            yield
            return
        self._meter = self._meter or _BytesByModule(_tensors_by_storage(self._model), self)
        self.place = ""
        with self._push_hooks(self._meter):
            yield
        self._known = self._known and not self._meter.missed
        if self._meter.live_bytes > sum(self._kept.values()):
            self._kept = self._meter.bytes_by_module()

    @contextmanager
    def _push_hooks(self, meter: Activations) -> Iterator[None]:
        """Push the meter's hooks for the block.

        The hooks are popped early if code in the block disables saved-tensor hooks. `torch.func`
        does so, and fails while there are hooks.
        """
        pushed, disable = True, _autograd._saved_tensors_hooks_disable

        def pop_and_disable(*args: Any, **kwargs: Any) -> None:
            nonlocal pushed
            if pushed and _top_hooks() == hooks:
                _autograd._pop_saved_tensors_default_hooks()
                pushed = self._known = False
            disable(*args, **kwargs)

        # torch.compile must not trace the hooks.
        hooks = torch.compiler.disable(meter.pack), torch.compiler.disable(meter.unpack)
        _autograd._push_saved_tensors_default_hooks(*hooks)
        _autograd._saved_tensors_hooks_disable = pop_and_disable
        try:
            yield
        finally:
            _autograd._saved_tensors_hooks_disable = disable
            if pushed:
                self._known = _remove_hooks(hooks) and self._known


class _BytesByModule(Activations):
    """Activations with the module that saved each storage first."""

    def __init__(self, held: Iterable[Tensor], memory: ForwardMemory) -> None:
        super().__init__(lambda: held)
        self._memory = memory
        self._places: dict[int, str] = {}

    def bytes_by_module(self) -> Mapping[str, int]:
        """Return the saved bytes by module name."""
        saved: Counter[str] = Counter()
        for key, place in self._places.items():
            saved[place] += self._bytes[key]
        return saved

    def on_storage_saved(self, key: int, size_bytes: int) -> None:
        super().on_storage_saved(key, size_bytes)
        self._places[key] = self._memory.place

    def on_storage_freed(self, key: int) -> None:
        super().on_storage_freed(key)
        del self._places[key]


def _top_hooks() -> Any:
    """Return the saved-tensor hooks in effect, or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _remove_hooks(hooks: tuple[Any, Any]) -> bool:
    """Remove hooks, also from below other hooks. Return whether they were the topmost hooks."""
    above = []
    while (top := _top_hooks()) is not None and top != hooks:
        above.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    _autograd._pop_saved_tensors_default_hooks()
    for other in reversed(above):
        _autograd._push_saved_tensors_default_hooks(*other)
    return not above


def _can_push_hooks() -> bool:
    """Whether hooks are enabled, and new hooks would not hide existing ones."""
    return (
        _autograd._saved_tensors_hooks_get_disabled_error_message() is None and _top_hooks() is None
    )


def _tensors_by_storage(model: nn.Module) -> list[Tensor]:
    """Return one parameter or buffer per storage. These storages exist without a forward, too."""
    by_storage: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with suppress(RuntimeError, NotImplementedError):  # sparse tensors have no storage
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return [*by_storage.values()]
