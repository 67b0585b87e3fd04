"""Accumulation windows: gradients summed over several iterations before they are applied."""

from __future__ import annotations

import torch

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.derive.windows import Windows
from offbeat.core.parts import part
from offbeat.core.plan import Plan


class Accumulation(Windows):
    """Accumulation windows of a plan that applies gradients in later iterations.

    `planned` is an iteration's number in the plan, from 0. Backward adds to the newest copy of the
    gradients while an older copy is averaged. Schedulers step only in iterations with an update.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        flat: Flat,
        gradients: Gradients,
    ):
        self._flat, self._gradients = flat, gradients
        super().__init__(plan)
        self._gate = part("SchedulerGate")(optimizer) if self.late else None
        self._version = flat.grad_version()

    def close(self) -> None:
        """Let learning-rate schedulers step in every iteration again."""
        if self._gate is not None:
            self._gate.close()

    def require_unchanged(self) -> None:
        """Raise ValueError if accumulated gradients were changed between two iterations."""
        if self.late and self._flat.grad_version() != self._version:
            raise ValueError(
                "gradients were changed between iterations (zeroed in place?), but this strategy "
                "adds them up over several; use zero_grad() of the prepared model or optimizer, "
                "which leaves them alone"
            )

    def on_iteration_end(self, planned: int) -> None:
        """Hide the gradients that `optimizer.step()` has applied, and update the scheduler gate."""
        if self._gate is None:
            return
        self._gradients.hide()
        self._version = self._flat.grad_version()
        self._gate.on_iteration_end(bool(self.applied_window(planned)))

    def restart(self) -> None:
        """Begin a window anew, after the storage was drained or filled from a checkpoint."""
        self._version = self._flat.grad_version()
