"""Work between iterations: completing, dropping or restarting what an engine has in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.derive import effects

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine


class Pauses:
    """Operations of an engine between two iterations."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flushing = False

    def flush(self) -> None:
        """Between iterations, complete the transfers and updates that the next forward would
        otherwise complete."""
        if self._flushing:  # a step hook within an update has read weights
            return
        if self._engine.now is None and self._engine.planned_iteration:
            self._engine.weight_looks.close()
            self._flushing = True
            try:
                self._engine.walker.flush(self._engine.planned_iteration)
            finally:
                self._flushing = False
            self._engine.reports.deliver()

    def pause(self) -> None:
        """Between iterations, wait for all messages. Raise RuntimeError within an iteration that
        cannot be dropped."""
        self._engine.abandon_unless_stepped()
        if self._engine.now is not None:
            self._engine.run.require_unsent(self._engine.now)
        self._drop()

    def _drop(self) -> None:
        """Drop the current iteration, which will not end, and complete all messages of earlier
        iterations.

        Transfers and updates that its forward has completed are not repeated.
        """
        if self._engine.now is not None:
            self._engine.walker.flush(self._engine.planned_iteration, begun=True)
            self._engine.run.pass_unsent_messages(self._engine.now)
            self._engine.now, self._engine.backward_over = None, False
            self._engine.begin()
        self.flush()
        self._engine.run.complete_all_messages()
        self._engine.reports.deliver()

    def settle(self) -> None:
        """Before this rank leaves the job, complete its updates and the messages that other ranks
        wait for. Drop an iteration that will not end."""
        if self._engine.waiting.failure is None:
            self._drop()

    def discard(self) -> bool:
        """Prepare for a load of other weights.

        Discard accumulated gradients and averages in flight, restart the plan if it has such state,
        and restart its buffers from the loaded weights.

        Returns:
            Whether all ranks must load the weights: True if the plan restarts, or if ranks update
                parameters from a common average.
        """
        self.flush()
        run = self._engine.run
        run.reloaded = True
        run.messages.coding.mark_stale()
        if run.windows.late or run.has_delayed_averages or self._engine.plan.source is not None:
            self.pause()
            run.windows.discard()
            run.discard_delayed_averages()
            self._restart_plan()
            return True
        return bool(effects.common_buffers(self._engine.plan))

    def drain(self) -> None:
        """Between iterations, apply all accumulated gradients, discard averages that are not yet
        applied, and restart the plan. Every rank must call this method.

        Averages in flight would make replicas differ again.
        """
        self.pause()
        if self._engine.run.windows.late:
            self._engine.run.windows.drain(
                self._engine.run.context, self._engine.iteration, self._engine.planned_iteration
            )
            self._restart_plan()
        elif self._engine.run.has_delayed_averages:
            self._engine.run.discard_delayed_averages()
            self._restart_plan()
        elif self._engine.plan.source is not None:  # `consolidate` copies the source's weights
            self._restart_plan()
            self._engine.run.messages.coding.mark_united()

    def _restart_plan(self) -> None:
        self._engine.start = self._engine.iteration
        self._engine.run.iterations.clear()
        self._engine.walker.flushed = None
        self._engine.metering.reset()
