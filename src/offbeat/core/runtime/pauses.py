"""Pauses: what is done between iterations, on behalf of whoever looks at the model or leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.derive import effects

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine


class Pauses:
    """Finishes, drops or begins anew what an engine has under way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flushing = False

    def flush(self) -> None:
        """Between iterations: do what the next forward would wait for and apply."""
        if self._flushing:  # code within an update reads weights, such as a step hook
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
        """Between iterations: nothing that has begun is left to wait for. RuntimeError in the
        middle of an iteration that cannot be given up."""
        self._engine.abandon_unless_stepped()
        if self._engine.now is not None:
            self._engine.run.require_unsent(self._engine.now)
        self._drop()

    def _drop(self) -> None:
        """Forget an iteration that has begun and will not end; what its forward has waited for
        and applied is not done again."""
        if self._engine.now is not None:
            self._engine.walker.flush(self._engine.planned_iteration, begun=True)
            self._engine.run.pass_unsent_messages(self._engine.now)
            self._engine.now, self._engine.backward_over = None, False
            self._engine.begin()
        self.flush()
        self._engine.run.complete_all_messages()
        self._engine.reports.deliver()

    def settle(self) -> None:
        """Before leaving: finish updates, and messages that others wait for. What has begun and
        will never end is dropped."""
        if self._engine.waiting.failure is None:
            self._drop()

    def discard(self) -> bool:
        """Other weights are about to be loaded: forget gradients that were added up and averages
        that have not landed, and begin the plan anew. Its buffers start again with what is loaded.
        Whether all ranks must load: where the plan begins anew, or ranks step from one average."""
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
        """Between iterations: also apply gradients that are not yet due, forget averages that have
        not landed (they would take replicas apart again), and begin the plan anew. Every rank must
        call it."""
        self.pause()
        if self._engine.run.windows.late:
            self._engine.run.windows.drain(
                self._engine.run.context, self._engine.iteration, self._engine.planned_iteration
            )
            self._restart_plan()
        elif self._engine.run.has_delayed_averages:
            self._engine.run.discard_delayed_averages()
            self._restart_plan()
        elif self._engine.plan.source is not None:  # other ranks are about to get its parameters
            self._restart_plan()
            self._engine.run.messages.coding.mark_united()

    def _restart_plan(self) -> None:
        self._engine.start = self._engine.iteration
        self._engine.run.iterations.clear()
        self._engine.walker.flushed = None
        self._engine.metering.reset()
