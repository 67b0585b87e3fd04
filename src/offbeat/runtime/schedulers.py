"""Learning-rate schedulers under merged gradients: they step only when the optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler


class SchedulerGate:
    """Skips `scheduler.step()` after iterations in which nothing was applied.

    Only of schedulers of this optimizer that are stepped once per iteration: one that is stepped
    more rarely (per epoch) goes on as it is. torch offers no hook on schedulers, so their classes
    are patched until `close`; a subclass defined later that does not call its parent's step is
    missed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._iterations = 0
        self._applied = True
        self._seen: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        self._patched: list[tuple[type[LRScheduler], Callable[..., None]]] = []
        for cls in _classes(LRScheduler):
            if "step" in vars(cls):
                self._patch(cls)

    def iteration(self, applied: bool) -> None:
        """`optimizer.step()` was called, and did or did not update."""
        self._iterations += 1
        self._applied = applied

    def close(self) -> None:
        for cls, step in self._patched:
            cls.step = step  # type: ignore[method-assign]
        self._patched = []

    def _patch(self, cls: type[LRScheduler]) -> None:
        original = cls.step
        gate = self

        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if not gate._skips(self):
                original(self, *args, **kwargs)

        cls.step = step  # type: ignore[method-assign,assignment]
        self._patched.append((cls, original))

    def _skips(self, scheduler: LRScheduler) -> bool:
        optimizer = getattr(scheduler.optimizer, "inner", scheduler.optimizer)  # prepare's or not
        if optimizer is not self._optimizer or getattr(scheduler, "_is_initial", False):
            return False
        since = self._iterations - self._seen.get(scheduler, 0)
        if since == 0:  # again in the same iteration: from a subclass to its parent
            return False
        self._seen[scheduler] = self._iterations
        return since == 1 and not self._applied


def _classes(cls: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _classes(child)
