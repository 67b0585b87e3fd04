"""Base class of sessions without a plan: iterations from a forward to `optimizer.step()`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.plan.semantics import is_finite
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.session import Session
from offbeat.core.runtime.training_job import TrainingJob

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace


class LoopSession(Session):
    """Session that counts, times and records iterations, and closes in one order.

    Subclasses define `_update`, and what else differs from a plain training loop.

    Args:
        job: objects of this rank.
        pace: pace of an emulated host; None elsewhere.
        watch: check for changed parameters in each forward; None: no check.
    """

    receivers: ClassVar[str] = "the other ranks"
    """Recipients of this rank's gradients or parameters, for error messages."""

    def __init__(
        self,
        job: TrainingJob,
        pace: Pace | None,
        watch: ParameterWatch | None = None,
    ):
        self._model, self._optimizer, self._cluster = job.model, job.optimizer, job.cluster
        self._recorder, self._pace, self._watch = job.recorder, pace, watch
        self._on_nonfinite = job.watch.on_nonfinite
        if pace is not None:
            pace.attach_backward_hooks(job.model)
            self.observers.add(pace)
        self._handles: list[Any] = []
        self._done = self._new_iteration(0)
        self._before = 0  # iterations of the run before this process

    # ---- implemented by subclasses ----------------------------------------------------------

    def _begin_iteration(self) -> None:
        """Prepare a forward in training mode, also a repeated one in an iteration."""

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return call(*args, **kwargs)

    @abstractmethod
    def _update(self, skip_update: bool) -> None:
        """Update the parameters or pass on the gradients, unless `skip_update`.

        Set the timestamp `stepped` if work follows that is no update.
        """

    def _report(self, done: Iteration) -> None:
        """Tell the observers of an iteration that has ended."""
        self.observers.ended(done)

    def _leave(self) -> None:
        """Complete this rank's part before it closes. Not called after an uncaught exception."""

    def _disconnect(self) -> None:
        """Close the connections of the session."""

    # ---- called by the user -----------------------------------------------------------------

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._watch is not None and torch.is_grad_enabled():
            self._watch.require_unchanged()
        marks, mark = self._done.marks, self._cluster.device.mark
        training = torch.is_grad_enabled() and self._model.training
        if training:
            self._cluster.require_open()
            self.observers.iteration_begins(self._done)
            self._begin_iteration()
        else:
            self.flush()
        marks.forward = mark()
        if training and marks.first_forward is None:
            marks.first_forward = marks.forward
        output = self._call(call, *args, **kwargs)
        if training:
            self.observers.reached(self._done, "forward")
        marks.forward_end = mark()
        return output

    def step(self, skip_update: bool) -> None:
        self._cluster.require_open()
        marks, mark, number = self._done.marks, self._cluster.device.mark, self._done.number
        marks.backward_end = marks.waited = marks.step = mark()
        if self._done.split is None:
            marks.ready = [marks.backward_end]
        self._update(skip_update)
        marks.end = mark()
        if marks.stepped is None:
            marks.stepped = marks.end
        if self._recorder:
            self._recorder.on_step_begin(number)
        self._report(self._done)
        if self._recorder:
            self._recorder.on_step_end(number)
        self._cluster.control.set_iteration(number + 1)
        self._done = self._new_iteration(number + 1)

    def zero_grad(self, set_to_none: bool) -> None:
        self._model.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # backward does not communicate

    @property
    def iteration(self) -> int:
        return self._before + self._done.number

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        self._cluster.require_open()
        self._before = iteration - self._done.number

    def close(self) -> None:
        if self._cluster.closed:
            return
        if not self._cluster.control.has_failed:
            self._leave()
        self._disconnect()
        if self._watch is not None:
            self._watch.close()
        for handle in self._handles:
            handle.remove()
        # A process that has joined a running job has no links and writes no record.
        if self._recorder and (traffic := self.traffic()):
            self._recorder.pace = self._pace.record() if self._pace else None
            self._recorder.write(traffic)
        self._cluster.close()

    # ---- used by subclasses -----------------------------------------------------------------

    def _new_iteration(self, number: int) -> Iteration:
        return Iteration(number, Timestamps(begin=self._cluster.device.mark()), [])

    def _require_acceptable_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Raise RuntimeError unless gradients are finite or `on_nonfinite` permits other values."""
        if self._on_nonfinite == "ignore":
            return
        if not all(is_finite(p.grad) for p in parameters if p.grad is not None):
            raise RuntimeError(
                f"rank {self._cluster.control.rank} has a gradient with NaN or infinity in "
                f"iteration {self._done.number}, and {self.receivers} would get it; lower the "
                "learning rate or clip gradients"
            )

    def _buffers(self) -> list[Tensor]:
        """Return the model's buffers that have elements."""
        return [b for b in self._model.buffers() if b.numel()]

    def _set_buffers(self, means: Sequence[Tensor]) -> None:
        """Write averages into `_buffers()`. Averages of integers are rounded."""
        for buffer, mean in zip(self._buffers(), means, strict=True):
            exact = mean if buffer.is_floating_point() else mean.round()
            buffer.copy_(exact.view(buffer.shape))
