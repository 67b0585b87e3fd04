"""Work between iterations: completing, dropping or restarting what an engine has in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.derive import effects
from offbeat.core.runtime.transforms import outside_transforms

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine


class Pauses:
    """Operations of an engine between two iterations."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @outside_transforms
    def flush(self) -> None:
        """Between iterations, complete the transfers and updates that the next forward would
        otherwise complete."""
        cursor = self._engine.cursor
        if cursor.now is None and cursor.planned:
            self._engine.weight_looks.close()
            cursor.flush()
            self._engine.observers.deliver()

    def pause(self) -> None:
        """Between iterations, wait for all messages. Raise RuntimeError within an iteration that
        cannot be dropped."""
        self._engine.abandon_unless_stepped()
        if self._engine.cursor.now is not None:
            self._engine.run.require_unsent(self._engine.cursor.now)
        self._drop()

    def _drop(self) -> None:
        """Drop the current iteration, which will not end, and complete all messages of earlier
        iterations. Averages that a later forward than the next one awaits will not be applied."""
        cursor = self._engine.cursor
        if cursor.now is not None:
            cursor.drop()
            self._engine.begin()
        self._engine.weight_looks.close()
        actions = self._engine.run.actions
        cursor.flush()
        actions.drops = True
        try:
            cursor.pause()
        finally:
            actions.drops = False
        self._engine.observers.deliver()

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
        run.actions.coding.mark_stale()
        if (
            run.traits.late
            or run.traits.has_delayed_averages
            or run.plan.source is not None
            or effects.has_late_messages(run.plan)
        ):
            self.pause()
            run.gradients.zero()
            run.windows.restart()
            run.discard_delayed_averages()
            self._engine.cursor.restart()
            return True
        return bool(effects.common_buffers(run.plan))

    def drain(self) -> None:
        """Between iterations, apply all accumulated gradients, discard averages that are not yet
        applied, and restart the plan. Every rank must call this method.

        Averages in flight would make replicas differ again.
        """
        self.pause()
        run = self._engine.run
        if run.traits.late:
            run.drain(self._engine.iteration)
            self._engine.cursor.restart()
        elif run.traits.has_delayed_averages:
            run.discard_delayed_averages()
            self._engine.cursor.restart()
        elif run.plan.source is not None:  # `consolidate` copies the source's weights
            self._engine.cursor.restart()
            run.actions.coding.mark_united()
