"""Guard for step hooks, which run once per bucket if an optimizer steps bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from offbeat.core.guards.foreign_step import ForeignStepGuard
from offbeat.core.guards.gradients_read import GRADIENTS, WEIGHTS, ReadHook


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks of the script run at the beginning of the optimizer's step."""
    own = optimizer._optimizer_step_pre_hooks
    every = _global_optimizer_pre_hooks.values()
    return bool(own) or any(not isinstance(hook, ForeignStepGuard) for hook in every)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks of the script run before or after the optimizer's step."""
    after = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    return has_pre_hooks(optimizer) or bool(after)


class StepHooks:
    """Requires that pre-hooks of a bucket's step neither read nor change gradients and weights.

    During the step of a bucket, gradients of other buckets are incomplete, and their weights are of
    another iteration. Changes of settings are refused as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]):
        self._optimizer, self._parameters = optimizer, parameters
        self._looks = ReadHook(parameters, self._note_read, (*GRADIENTS, *WEIGHTS))

    @contextmanager
    def watch(self, settings: Callable[[], Any], remedy: str) -> Iterator[None]:
        """Compare `settings()`, gradients and weights before and after the hooks of a step.

        Raises:
            ValueError: a hook has read or changed gradients or weights, or has changed settings. It
                is raised before the optimizer changes any weight.
        """
        before, self._read, compared = (settings(), self._versions()), False, False

        def compare(*_: Any) -> None:
            nonlocal compared
            if compared:  # `step` may call `step` of its base class, which runs the hooks again
                return
            compared = True
            self._looks.close()
            if self._read or (settings(), self._versions()) != before:
                done = "reads" if self._read else "changes"
                raise ValueError(
                    f"a hook before the step of {type(self._optimizer).__name__} "
                    f"(register_step_pre_hook) {done} gradients, weights or settings, but this "
                    "strategy steps bucket by bucket, and the hook runs once per bucket; register "
                    f"it before the first iteration, or {remedy}"
                )

        last = self._optimizer.register_step_pre_hook(compare)
        self._looks.open()
        try:
            yield
        finally:
            self._looks.close()
            last.remove()

    def _note_read(self) -> None:
        self._read = True

    def _versions(self) -> list[tuple[int, int, int]]:
        """Return identity and version of each gradient, and the version of each weight."""
        found = [(p, p.grad) for p in self._parameters]
        return [(id(g), 0 if g is None else g._version, p._version) for p, g in found]
