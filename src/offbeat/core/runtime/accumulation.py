"""Accumulation windows: gradients summed over several iterations before they are applied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offbeat.core.buckets.autograd_gradients import AutogradGradients
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.derive import effects
from offbeat.core.derive.windows import Windows
from offbeat.core.plan import Apply, Moment, Payload, Phases, Plan, Transfer, groups_of
from offbeat.core.rules import RULES
from offbeat.core.runtime.context import StorageContext
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.schedulers import SchedulerGate
from offbeat.core.runtime.updates import Updates
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.link import LinkThread


class Accumulation:
    """Accumulation windows of a plan that applies gradients in later iterations.

    `planned` is an iteration's number in the plan, from 0. Backward adds to the newest copy of the
    gradients while an older copy is averaged. Schedulers step only in iterations with an update.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        flat: Flat,
        gradients: Gradients | AutogradGradients,
        updates: Updates,
        links: Mapping[str, LinkThread],
        waiting: Waiting,
    ):
        self._plan, self._flat, self._gradients = plan, flat, gradients
        self._updates = updates
        self._links, self._waiting = links, waiting
        self._windows = Windows(plan)
        self.late = self._windows.late
        self._update = next((a for a in plan.applies if effects.is_update(a)), None)
        self._gate = SchedulerGate(optimizer) if self.late else None
        self._version = flat.grad_version()

    def close(self) -> None:
        """Let learning-rate schedulers step in every iteration again."""
        if self._gate is not None:
            self._gate.close()

    def applied_iterations(self, planned: int) -> range:
        """Return the iterations whose gradients the step of iteration `planned` applies."""
        return self._windows.applied_window(planned)

    def is_window_end(self, planned: int) -> bool:
        """Return whether a window ends with iteration `planned`."""
        return self._windows.closes_window(planned)

    def require_unchanged(self) -> None:
        """Raise ValueError if accumulated gradients were changed between two iterations."""
        if self.late and self._flat.grad_version() != self._version:
            raise ValueError(
                "gradients were changed between iterations (zeroed in place?), but this strategy "
                "adds them up over several; use zero_grad() of the prepared model or optimizer, "
                "which leaves them alone"
            )

    def on_iteration_end(self, planned: int) -> None:
        """Direct gradients to the newest copy again after `optimizer.step()`, and update the
        scheduler gate."""
        if self._gate is None:
            return
        self._gradients.open()
        self._version = self._flat.grad_version()
        self._gate.on_iteration_end(bool(self.applied_iterations(planned)))

    def on_restore(self) -> None:
        """Continue after the gradients of a checkpoint were copied into the storage."""
        self._restart()

    # ---- leaving the plan -------------------------------------------------------------------

    def discard(self) -> None:
        """Discard all accumulated gradients; the plan restarts at its iteration 0."""
        self._gradients.zero()
        self._restart()

    def drain(self, context: StorageContext, iteration: int, planned: int) -> None:
        """Average and apply the gradients that earlier iterations have accumulated; the plan
        restarts at its iteration 0. Every rank must call this method.

        Args:
            context: storage on which the rules run.
            iteration: number of the next iteration in the run.
            planned: number of the next iteration in the plan.
        """
        closed, opened = self._windows.window(planned, age=1), self._windows.window(planned)
        context.iteration = Iteration(iteration, Timestamps(), [], planned)
        if closed:
            self._send_remaining(iteration, planned, closed)
            self._apply(context, 1)
        if opened.start < planned:
            everything = Payload("grad", range(len(self._flat.buckets)))
            whole = (name for name in self._links if not groups_of(name, self._plan.groups))
            self._send(iteration, everything, next(whole))
            self._apply(context, 0)
        self._restart()

    def _restart(self) -> None:
        self._gradients.open()
        self._version = self._flat.grad_version()

    def _send_remaining(self, iteration: int, planned: int, window: range) -> None:
        """Send the messages of the closed window that the plan schedules in later iterations."""
        while True:
            for t in self._plan.transfers:
                if t.payload.age and self._plan.phase(planned) in t.phases:
                    self._send(iteration, t.payload, t.link)
            if self._windows.applied_window(planned) == window:
                return
            planned += 1

    def _send(self, iteration: int, payload: Payload, link: str) -> None:
        """Average the payload on the link now, and wait for the result."""
        end = Moment("end")
        message = self._links[link].enqueue(Transfer(payload, end, end, Phases(), link), iteration)
        copy = self._flat.copy_index("grad", payload.age)
        self._links[link].release(message, self._flat.message_tensors(payload, copy))
        self._waiting.wait(message, self._flat)

    def _apply(self, context: StorageContext, age: int) -> None:
        if self._update is None:
            return
        everything = range(len(self._flat.buckets))
        args = tuple((dict(self._update.args) | {"age": age}).items())
        apply = Apply(self._update.rule, everything, Moment("step"), Phases(), args=args)
        self._updates.show_gradients([apply])
        RULES[apply.rule](context, apply)
