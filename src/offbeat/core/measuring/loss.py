"""Recording of the training loss in `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat.core.transport.device import Mark


class LossTap:
    """Records the last scalar on which `backward` was called, until `close`.

    So scripts need not report their loss. The cost is one attribute look-up per iteration. Taps may
    be nested and closed in any order.

    Attributes:
        began: mark of the start of the last backward, by the function `mark`.
        ended: mark of the end of the backward before the last one.
    """

    def __init__(self, mark: Callable[[], Mark] = lambda: None) -> None:
        self._loss: Tensor | None = None
        self.began: Mark = None
        self.ended: Mark = None
        self._last: Mark = None
        self._open = True
        self._original = original = torch.Tensor.backward
        tap = self

        def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
            if tap._open and self.numel() == 1:
                tap._loss = self.detach()
            tap.began, tap.ended = mark(), tap._last
            original(self, *args, **kwargs)
            tap._last = mark()

        backward.tap = self  # type: ignore[attr-defined]
        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]

    def take(self) -> Tensor | None:
        """Return the last loss since the last call; None if there was none."""
        loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        self._open = False
        # An older tap that was closed first is still installed below this one.
        while (tap := getattr(torch.Tensor.backward, "tap", None)) is not None and not tap._open:
            torch.Tensor.backward = tap._original  # type: ignore[method-assign]
