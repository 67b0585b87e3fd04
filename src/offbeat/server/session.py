"""Base class of the sessions of workers with a parameter server."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat.core.guards.finite import OnNonfinite, all_finite
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.prepared import Position, Session
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.transport.cluster import Cluster
from offbeat.server.client import Client
from offbeat.server.serving import client_of, serve
from offbeat.server.strategies import NO_CHECKPOINT, ServedStrategy

if TYPE_CHECKING:
    from offbeat.experiments.record.recorder import Recorder
    from offbeat.lab.pace import Pace


@dataclass(frozen=True)
class Worker:
    """The user's model and optimizer, and the worker's cluster, client, recorder and pace."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    cluster: Cluster
    client: Client
    recorder: Recorder | None
    on_nonfinite: OnNonfinite
    pace: Pace | None = None


class ServedSession(Session):
    """Session that counts, times and records iterations.

    Subclasses exchange gradients and parameters with the servers in `_begin` and `_end`.
    """

    elsewhere = NO_CHECKPOINT

    def __init__(self, worker: Worker):
        self._pace = worker.pace
        if self._pace is not None:
            self._pace.attach_backward_hooks(worker.model)
        self._model, self._optimizer = worker.model, worker.optimizer
        self._cluster, self._client = worker.cluster, worker.client
        self._recorder = worker.recorder
        self._on_nonfinite: OnNonfinite = worker.on_nonfinite
        layout = worker.client.layout
        self._held: Sequence[Tensor] = layout.parameters
        self._outgoing = layout.views(worker.client.outgoing)
        self._incoming = layout.views(worker.client.incoming)
        self._handles: list[Any] = []
        self._listener: Callable[[Iteration], None] | None = None
        self._parameters = ParameterWatch(worker.model)
        self._parameters.attach(p for p in worker.model.parameters() if p.requires_grad)
        self._done = Iteration(0, self._new_marks(), [])
        self._before = 0  # iterations of earlier jobs, up to the servers' snapshot

    # ---- implemented by subclasses ----------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Called before each forward in training mode, also a repeated one in an iteration."""

    @abstractmethod
    def _end(self, skip_update: bool) -> None:
        """Implements `optimizer.step()`: push this iteration's gradients, unless `skip_update`.

        Sets the timestamp `stepped`.
        """

    # ---- checkpoints ------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self._before + self._done.number

    def capture_position(self) -> Position:
        raise ValueError(NO_CHECKPOINT)

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        raise ValueError(NO_CHECKPOINT)

    # ---- called by the user -----------------------------------------------------------------

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._parameters.require_unchanged()
        training = torch.is_grad_enabled() and self._model.training
        if training:
            self._cluster.require_open()
        pace = self._pace if training else None
        if pace is not None:
            pace.on_iteration_begin(self._done.number, self._marks.begin)
        if training:
            self._begin()
        else:
            self.flush()
        if pace is not None:
            pace.on_wait_end()
        mark = self._cluster.device.mark
        self._marks.forward = mark()
        output = call(*args, **kwargs)
        if pace is not None:
            pace.forward(-1)
        self._marks.forward_end = mark()
        return output

    def step(self, skip_update: bool) -> None:
        self._cluster.require_open()
        marks = self._marks
        marks.backward_end = marks.waited = marks.step = self._cluster.device.mark()
        marks.ready = [marks.backward_end]
        self._densify_gradients()
        self._end(skip_update)
        marks.end = self._cluster.device.mark()
        if self._recorder:
            self._recorder.on_step_begin(self._done.number)
            self._recorder.add_iteration(self._done)
        if self._listener is not None:
            self._listener(self._done)
        self._done = Iteration(self._done.number + 1, self._new_marks(), [])

    def zero_grad(self, set_to_none: bool) -> None:
        self._model.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # backward does not communicate

    def traffic(self) -> dict[str, int]:
        return {next(iter(self._cluster.links)): self._client.bytes_sent}

    def listen(self, listener: Callable[[Iteration], None]) -> None:
        self._listener = listener

    def close(self) -> None:
        if self._cluster.closed:
            return
        if getattr(sys, "last_value", None) is None:  # no uncaught exception
            with suppress(RuntimeError):  # lost servers have been reported already
                self._leave()
        with suppress(RuntimeError):
            self._client.close()
        self._parameters.close()
        for handle in self._handles:
            handle.remove()
        if self._recorder:
            self._recorder.pace = self._pace.record() if self._pace else None
            self._recorder.write(self.traffic())
        self._cluster.close()

    def _leave(self) -> None:
        """Called by `close` while the client is still connected, unless this rank has failed."""

    # ---- used by subclasses -----------------------------------------------------------------

    @property
    def _marks(self) -> Timestamps:
        return self._done.marks

    def _new_marks(self) -> Timestamps:
        return Timestamps(begin=self._cluster.device.mark())

    def _densify_gradients(self) -> None:
        """Convert sparse gradients to dense ones: pushes are flat tensors."""
        for t in self._held:
            if t.grad is not None and t.grad.is_sparse:
                t.grad = t.grad.to_dense()

    def _can_push(self) -> bool:
        """Return whether to push the gradients, by `on_nonfinite`: "raise", "skip", "ignore"."""
        if self._on_nonfinite == "ignore":
            return True
        if all_finite(t.grad for t in self._held if t.grad is not None):
            return True
        if self._on_nonfinite == "skip":
            return False
        raise RuntimeError(
            f"rank {self._cluster.control.rank} has a gradient with NaN or infinity in "
            f"iteration {self._done.number}; lower the learning rate, or on_nonfinite='skip'"
        )

    def _average_buffers(self) -> None:
        """Average the model's buffers over all workers; round averages of integers."""
        buffers = [b for b in self._model.buffers() if b.numel()]
        numbers = [b.detach().to("cpu", torch.float64).reshape(-1) for b in buffers]
        means = self._client.average(
            torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.float64, device="cpu")
        )
        parts = means.split([b.numel() for b in buffers]) if buffers else []
        for buffer, mean in zip(buffers, parts, strict=True):
            exact = mean if buffer.is_floating_point() else mean.round()
            buffer.copy_(exact.view(buffer.shape))


def open_served_session(strategy: ServedStrategy, job: TrainingJob) -> ServedSession:
    """Return the session of a worker.

    On a rank of a server, serve until all workers have left, then raise SystemExit(0).
    """
    if job.cluster.control.rank in job.ranks.servers:
        serve(job.model, job.optimizer, strategy, job.ranks, job.cluster)
        raise SystemExit(0)
    pace = job.requested_pace()
    if job.recorder:
        job.recorder.start(str(strategy), None, observed=0)
    client = client_of(job.optimizer, strategy, job.ranks, job.cluster)
    policy = job.watch.on_nonfinite
    worker = Worker(job.model, job.optimizer, job.cluster, client, job.recorder, policy, pace)
    return strategy.open_worker(worker)
