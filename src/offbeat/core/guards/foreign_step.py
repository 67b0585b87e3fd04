"""Guard against steps of other optimizers on parameters of the prepared optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

GIVEN = (
    "step() was called on the optimizer that offbeat.prepare was given, so nothing is averaged; "
    "call it on the one that offbeat.prepare returned"
)


class SessionSteps:
    """Context of steps that the session itself makes. It may be nested."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class ForeignStepGuard:
    """Raises if another optimizer of this process steps parameters of the prepared optimizer.

    It is active from construction until `close`.

    Args:
        optimizer: the user's optimizer that was prepared.
        shared: returns whether other optimizers may step the same parameters now. They may if only
            gradients are averaged, and averages are complete between backward and step.

    Attributes:
        session_steps: context in which all steps are allowed.
        has_script_step: whether an optimizer has stepped in `script_steps`.
    """

    def __init__(self, optimizer: Optimizer, shared: Callable[[], bool]):
        self._optimizer, self._shared = optimizer, shared
        self.session_steps, self.has_script_step = SessionSteps(), False
        self._before: Callable[[], None] | None = None  # called before a step in `script_steps`
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._handle = register_optimizer_step_pre_hook(self)

    @contextmanager
    def script_steps(self, before: Callable[[], None], *, inner: bool) -> Iterator[None]:
        """Allow steps of the prepared parameters in the block, each after a call of `before`.

        Other optimizers may step. If `inner` is true, the prepared optimizer may step too.
        """
        self._before, self._inner, self.has_script_step = before, inner, False
        try:
            yield
        finally:
            self._before = None

    def close(self) -> None:
        """Remove the hook. Further calls do nothing."""
        self._handle.remove()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Act before a step of any optimizer of the process, as a hook."""
        if self.session_steps.depth:
            return
        if self._before is not None and self._shares_parameters(optimizer):
            if self._inner or optimizer is not self._optimizer:
                self._before()
                self.has_script_step = True
            return
        if optimizer in self._harmless:
            return
        if self._wraps_prepared(optimizer) or not self._shares_parameters(optimizer):
            self._harmless.add(optimizer)
            return
        if self._shared():
            return
        if optimizer is self._optimizer:
            raise RuntimeError(GIVEN)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps parameters that another optimizer was prepared for, "
            "so nothing of its updates is averaged when it should be; step the optimizer that "
            "offbeat.prepare returned, or call model.close() and prepare model.module with this one"
        )

    def _wraps_prepared(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` is a wrapper of the prepared optimizer, or holds one."""
        values = (optimizer, *vars(optimizer).values())
        return any(getattr(value, "inner", None) is self._optimizer for value in values)

    def _shares_parameters(self, optimizer: Optimizer) -> bool:
        prepared = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        return any(id(p) in prepared for group in optimizer.param_groups for p in group["params"])
