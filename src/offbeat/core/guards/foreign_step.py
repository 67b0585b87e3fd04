"""The guard of who steps: an optimizer that steps what the prepared one steps is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

GIVEN = (
    "step() was called on the optimizer that offbeat.prepare was given, so nothing is averaged; "
    "call it on the one that offbeat.prepare returned"
)


class ForeignStepGuard:
    """Sees the steps of every optimizer of this process, from its making to `close`.

    `shared`: whether others may step the same parameters now, as where gradients alone are
    averaged, and are complete between backward and step. Parameters that the prepared optimizer
    does not have are anybody's.
    """

    hooks: ClassVar[int] = 0
    """How many of torch's global hooks are ours."""

    def __init__(self, optimizer: Optimizer, shared: Callable[[], bool]):
        self._optimizer, self._shared = optimizer, shared
        self._own = False
        self._before: Callable[[], None] | None = None  # steps that the script drives
        self.has_script_step = False  # such a step
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._handle: Any = register_optimizer_step_pre_hook(self._stepped)
        ForeignStepGuard.hooks += 1

    @contextmanager
    def session_steps(self) -> Iterator[None]:
        """Whatever steps within does so on behalf of the session."""
        before, self._own = self._own, True
        try:
            yield
        finally:
            self._own = before

    @contextmanager
    def script_steps(self, before: Callable[[], None], *, inner: bool) -> Iterator[None]:
        """Allow steps of the prepared parameters within, each after a call of `before`: by other
        optimizers, and if `inner` also by the prepared one."""
        self._before, self._inner, self.has_script_step = before, inner, False
        try:
            yield
        finally:
            self._before = None

    def close(self) -> None:
        """Look no longer; twice is fine."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            ForeignStepGuard.hooks -= 1

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._own:
            return
        if self._before is not None and self._meets(optimizer):
            if self._inner or optimizer is not self._optimizer:
                self._before()
                self.has_script_step = True
            return
        if optimizer in self._harmless:
            return
        if self._leads_here(optimizer) or not self._meets(optimizer):
            self._harmless.add(optimizer)
            return
        if self._shared():
            return
        if optimizer is self._optimizer:
            raise RuntimeError(GIVEN)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps parameters that another optimizer was prepared for, "
            "so nothing of its updates is averaged when it should be; step the optimizer that "
            "offbeat.prepare returned, or call model.close() and prepare the model with this one"
        )

    def _leads_here(self, optimizer: Optimizer) -> bool:
        """Whether it is the prepared one, or somebody's wrapper of that."""
        values = (optimizer, *vars(optimizer).values())
        return any(getattr(value, "inner", None) is self._optimizer for value in values)

    def _meets(self, optimizer: Optimizer) -> bool:
        mine = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
