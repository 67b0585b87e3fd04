"""Learning-rate schedulers under merged gradients: they step only when the optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler

from offbeat.core.runtime.prepared import Optimizer


class SchedulerGate:
    """Skips `scheduler.step()` after iterations in which nothing was applied.

    Only of schedulers of this optimizer that are stepped in every iteration, once or several times
    (accelerate steps them once per process): one decision holds for a scheduler and an iteration.
    One that is stepped more rarely (per epoch) goes on as it is. torch offers no hook on
    schedulers, so their classes are patched while any gate is open; a subclass defined later that
    does not call its parent's step is missed.
    """

    _open: ClassVar[list[SchedulerGate]] = []
    _originals: ClassVar[dict[type[LRScheduler], Callable[..., None]]] = {}

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._iterations = 0
        self._applied = True
        # By scheduler: the iteration of its last step, and whether it was skipped there.
        self._seen: WeakKeyDictionary[LRScheduler, tuple[int, bool]] = WeakKeyDictionary()
        if not self._open:
            self._patch()
        self._open.append(self)

    def on_iteration_end(self, applied: bool) -> None:
        """`optimizer.step()` was called, and did or did not update."""
        self._iterations += 1
        self._applied = applied

    def close(self) -> None:
        self._open.remove(self)
        if not self._open:
            for cls, step in self._originals.items():
                cls.step = step  # type: ignore[method-assign]
            self._originals.clear()

    @classmethod
    def _patch(cls) -> None:
        for scheduler in dict.fromkeys(_classes(LRScheduler)):
            if "step" in vars(scheduler):
                cls._originals[scheduler] = scheduler.step
                scheduler.step = cls._wrap_step(scheduler.step)  # type: ignore[method-assign]

    @classmethod
    def _wrap_step(cls, original: Callable[..., None]) -> Callable[..., None]:
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if not any(gate._is_skipped(self) for gate in cls._open):
                original(self, *args, **kwargs)

        return step

    def _is_skipped(self, scheduler: LRScheduler) -> bool:
        optimizer = scheduler.optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = optimizer.inner
        if optimizer is not self._optimizer or getattr(scheduler, "_is_initial", False):
            return False
        last, skipped = self._seen.get(scheduler, (0, False))
        since = self._iterations - last
        if since:
            skipped = since == 1 and not self._applied
            self._seen[scheduler] = self._iterations, skipped
        return skipped


def _classes(cls: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _classes(child)
