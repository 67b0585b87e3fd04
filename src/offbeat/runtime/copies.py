"""Copies of the gradients: one that backward adds to, and with merged generations one more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from offbeat.plan import Merge
from offbeat.runtime.flat import Flat


class Copies:
    """Which copy of the gradients is open, and what the parameters' `grad` shows.

    Without merging there is one copy: it is added to, averaged and applied. With merging the
    generation that closed before lies in the other copy until it is applied.
    """

    def __init__(self, flat: Flat, merged: bool):
        self._flat = flat
        self._parameters = [p for bucket in flat.buckets for p in bucket.parameters]
        self.count = 2 if merged else 1
        self.open(0)

    @property
    def closed(self) -> int:
        """The copy that is averaged and applied."""
        return self.count - 1 - self.opened

    def open(self, copy: int) -> None:
        """Gradients go to this copy from now on."""
        self.opened = copy
        self.views = self._flat.views(copy)
        self._show(self.views)

    def swap(self) -> None:
        """The open generation closes; the other copy, empty by now, is open."""
        self.open(self.closed)

    def show(self, applied: range, merge: Merge) -> None:
        """Let code between backward and step see the gradients that are applied, if any are."""
        if applied and merge == "mean" and len(applied) > 1:
            self._flat.scale_grads(1 / len(applied), self.closed)
        self._show(self._flat.views(self.closed) if applied else [None] * len(self._parameters))

    def discard(self) -> None:
        """What was closed has been applied."""
        self._flat.scale_grads(0.0, self.closed)

    def _show(self, gradients: Iterable[Tensor | None]) -> None:
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient
