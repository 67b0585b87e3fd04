"""Gate for learning-rate schedulers: schedulers step only in iterations with an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler

from offbeat.core.runtime.prepared import Optimizer


class SchedulerGate:
    """Gate that skips `scheduler.step()` after iterations without an update.

    The gate applies to schedulers of this optimizer that step in every iteration, once or several
    times: accelerate calls `step` once per process. The decision is the same for all calls of a
    scheduler in one iteration. The gate does not affect schedulers that step less often, such as
    once per epoch.

    torch has no hooks on schedulers, so their classes are patched while a gate is open. The patch
    does not reach a subclass that is defined later and does not call its parent's `step`.
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
        """Handle a call of `optimizer.step()`; `applied`: whether it has updated parameters."""
        self._iterations += 1
        self._applied = applied

    def close(self) -> None:
        """Close the gate. Remove the patches if no other gate is open."""
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
        """Return a `step` that any open gate can skip."""

        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if not any(gate._is_skipped(self) for gate in cls._open):
                original(self, *args, **kwargs)

        return step

    def _is_skipped(self, scheduler: LRScheduler) -> bool:
        """Return whether this gate skips a call of `step` of the scheduler."""
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
