"""The training loss, seen where the user computes it: in `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat.core.transport.device import Mark


class LossTap:
    """Notes the value of the last scalar that backward was called on, until `close`.

    Scripts need not report their loss. One attribute look-up per iteration; taps may be nested
    and closed in any order. With a function `mark` it also marks when the last backward `began`,
    and when the one before `ended`.
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
        """The loss since it was last taken; None if there was none."""
        loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        self._open = False
        # An older tap that was closed first is still installed below this one.
        while (tap := getattr(torch.Tensor.backward, "tap", None)) is not None and not tap._open:
            torch.Tensor.backward = tap._original  # type: ignore[method-assign]
