"""Recording of the training loss in `loss.backward()`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from offbeat.core.transport.device import Mark

# No scalar, and no loss before its scale.
NOT_SCALED: tuple[Callable[[], Any], Any] = (lambda: None), None
_this_thread = threading.local()


@contextmanager
def accumulation() -> Iterator[None]:
    """In the body, `backward` only accumulates: its loss is a part of the iteration's."""
    before = is_accumulating()
    _this_thread.accumulates = True
    try:
        yield
    finally:
        _this_thread.accumulates = before


def is_accumulating() -> bool:
    """Return whether this thread is within `accumulation`."""
    return getattr(_this_thread, "accumulates", False)


class LossTap:
    """Records the last scalar on which each thread has called `backward`, until `close`.

    So scripts need not report their loss. The scalars of an accumulation are added up, as most
    scripts divide them by their number. A scalar that a GradScaler has scaled is recorded as it was
    before. The cost is one attribute look-up and one copy of a scalar per iteration. Taps may be
    nested and closed in any order.

    Attributes:
        began: mark of the start of the last backward, by the function `mark`.
        ended: mark of the end of the backward before the last one.
    """

    def __init__(self, mark: Callable[[], Mark] = lambda: None) -> None:
        self._threads = threading.local()
        self.began: Mark = None
        self.ended: Mark = None
        self._last: Mark = None
        self._open = True
        self._original = original = torch.Tensor.backward
        self._original_scale = original_scale = GradScaler.scale
        tap = self

        def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
            if tap._open and self.numel() == 1:
                scaled, loss = getattr(tap._threads, "scaled", NOT_SCALED)
                tap._add(loss if scaled() is self else self.detach())
            tap.began, tap.ended = mark(), tap._last
            original(self, *args, **kwargs)
            tap._last = mark()

        def scale(self: GradScaler, outputs: Any) -> Any:
            scaled = original_scale(self, outputs)
            if isinstance(scaled, Tensor) and scaled is not outputs:
                tap._threads.scaled = ref(scaled), outputs.detach()  # a weak one: it has a graph
            return scaled

        GradScaler.scale = scale  # type: ignore[method-assign,assignment]
        backward.tap = self  # type: ignore[attr-defined]
        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]

    @property
    def _loss(self) -> Tensor | None:
        return getattr(self._threads, "loss", None)

    @_loss.setter
    def _loss(self, loss: Tensor | None) -> None:
        self._threads.loss = loss

    def _add(self, loss: Tensor) -> None:
        earlier = self._loss if getattr(self._threads, "accumulates", False) else None
        # The script may change its tensor in place before the loss is read.
        own = loss.reshape(())
        self._loss = own.clone() if earlier is None else earlier + own
        self._threads.accumulates = is_accumulating()

    def take(self) -> Tensor | None:
        """Return the last loss of this thread since the last call; None if there was none."""
        loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        self._open = False
        # An older tap that was closed first is still installed below this one.
        while (tap := getattr(torch.Tensor.backward, "tap", None)) is not None and not tap._open:
            torch.Tensor.backward = tap._original  # type: ignore[method-assign]
            GradScaler.scale = tap._original_scale  # type: ignore[method-assign]
