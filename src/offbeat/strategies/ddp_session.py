"""Session of the baseline: torch's own DistributedDataParallel (DDP), unchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from offbeat.core.buckets.attached import UncopiedHook
from offbeat.core.guards.replicas import average_replicas, repair, require_equal
from offbeat.core.plan import Plan
from offbeat.core.runtime.iteration import BackwardSplit, Iteration
from offbeat.core.runtime.session import Position
from offbeat.core.runtime.training_job import TrainingJob, open_pace
from offbeat.core.transport.failure_detector import IN_SCRIPT
from offbeat.sessions.loop_session import LoopSession

# Name of DDP's option for module buffers: torch 2.13 warns of the former name.
BUFFERS_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

queue = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


class BackwardClock:
    """Reader of torch's own times of a backward: when it computed and when its messages were sent.

    The interface is private to torch; without it no times are available. The times of a backward
    are available after the next synchronized forward has begun.
    """

    def __init__(self, module: DistributedDataParallel, every: int = 1) -> None:
        """Read the times of one in `every` backwards. On a GPU, each read waits for the device."""
        self._module, self._every, self._forwards = module, every, 0
        self._start = 0
        sample = getattr(module, "_set_ddp_runtime_logging_sample_rate", None)
        if sample is not None:
            sample(every)

    def new_times(self) -> tuple[float, float] | None:
        """Return the seconds of messages and the seconds for which compute waited for messages;
        None if they are not due, or were returned before."""
        self._forwards += 1
        if self._forwards % self._every:
            return None
        try:
            data = self._module._get_ddp_logging_data()
            start = int(data["backward_compute_time_start"])
            sent, hidden = (
                int(data[f"backward_{name}_time"]) for name in ("comm", "compute_comm_overlap")
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return None
        if start == self._start:
            return None
        self._start = start
        return sent * 1e-9, max(0, sent - hidden) * 1e-9


class DDPSession(LoopSession):
    """Session that passes all calls to DDP and marks the start and end of iterations."""

    def __init__(self, job: TrainingJob, bucket_cap_mb: float | None):
        profile, replica, model = job.profile, job.cluster.replica, job.model
        trained = [p for p in model.parameters() if p.requires_grad]
        share = job.cluster.topology.ring_share(job.cluster.control.rank)
        self._bytes_per_iteration = round(share * sum(p.nbytes for p in trained))
        super().__init__(job, open_pace(profile, replica))
        self.module = DistributedDataParallel(
            model,
            process_group=job.cluster.everyone,
            bucket_cap_mb=bucket_cap_mb,  # type: ignore[arg-type]
            **{BUFFERS_OPTION: job.watch.broadcast_buffers},  # type: ignore[arg-type]
        )
        self._handles = [
            model.register_forward_pre_hook(UncopiedHook(self._end_wait_for_buffers), prepend=True),
            trained[-1].register_hook(lambda _: queue(self._wait_in_backward)),
        ]
        self._forward_seen = False  # whether DDP has seen a forward in this iteration
        self._backward_s: float | None = None  # seconds of compute in the profile
        if profile is not None:
            scale = profile.rank_scale[replica] if profile.rank_scale else 1.0
            self._backward_s = profile.backward_s * scale
        self._clock: BackwardClock | None = None
        if job.recorder and (job.recorder.splits_every == 1 or job.cluster.where.type == "cpu"):
            self._clock = BackwardClock(self.module, job.recorder.splits_every)
        self._pending: Iteration | None = None  # waits for its split until the next forward

    def begin(self) -> None:
        """Start the time of the first iteration."""
        self._done = self._new_iteration(0)

    def _new_iteration(self, number: int) -> Iteration:
        new = super()._new_iteration(number)
        new.split = BackwardSplit(next(iter(self._cluster.links)), self._bytes_per_iteration)
        return new

    def capture_position(self) -> Position:
        self._cluster.require_open()
        return Position(self.iteration, alike=True)

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._cluster.closed:
            return call(*args, **kwargs)
        if call is self._model:
            output = self._call_ddp(*args, **kwargs)
        else:
            output = self._announce(call(*args, **kwargs))
        if self._clock is not None and torch.is_grad_enabled():
            self._take_split(self._clock)
        self._forward_seen = True
        return output

    def drive(
        self, call: Callable[..., Any], closure: Any = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        if closure is not None:
            args = (torch.enable_grad()(closure), *args)
        return call(*args, **kwargs), closure is not None

    def note_forward(self, output: object) -> None:
        self._announce(output)
        self._forward_seen = True

    def _announce(self, output: Any) -> Any:
        """Prepare DDP for a backward of the tensors in `output`, which a method of the model has
        returned.

        DDP's own forward is called with an identity in place of the model, and returns `output`.
        """
        modules = self.module._modules
        modules["module"], model = nn.Identity(), modules["module"]
        try:
            return self._call_ddp(output)
        finally:
            modules["module"] = model

    def _require_forward(self) -> None:
        """Raise RuntimeError if gradients exist without a forward that DDP has seen."""
        ranks, parameters = self._cluster.control.world_size, self._model.parameters()
        if not self._forward_seen and ranks > 1 and any(p.grad is not None for p in parameters):
            raise RuntimeError(
                "optimizer.step() without a forward of the prepared model: torch's "
                "DistributedDataParallel averages only gradients that its forward has announced; "
                "call the model that offbeat.prepare returned, or one of its methods that return "
                "what backward begins from, or use another strategy, such as WFBP()"
            )
        self._forward_seen = False

    def _call_ddp(self, *args: Any, **kwargs: Any) -> Any:
        """Call DDP. DDP waits for rank 0's buffers before the model's own forward."""
        set_wait = self._cluster.control.set_wait_in_torch
        set_wait("in forward, waiting for DDP's buffers")
        output = self.module(*args, **kwargs)
        set_wait(None)
        return output

    def _end_wait_for_buffers(self) -> None:
        self._cluster.control.set_wait_in_torch(None)
        self.observers.waited()

    def _wait_in_backward(self) -> None:
        """Set the state of this rank for DDP's wait at the end of backward.

        Torch runs queued callbacks in order: this one, DDP's wait, and the one queued here.
        """
        set_wait = self._cluster.control.set_wait_in_torch
        set_wait("in backward, waiting for DDP's gradients")
        queue(lambda: set_wait(None))

    def _update(self, skip_update: bool) -> None:
        self.observers.waited()  # DDP has waited for its messages within backward
        if not skip_update:
            self._require_forward()
            self._optimizer.step()
            self.observers.updated(self._done, None)

    def _report(self, done: Iteration) -> None:
        self._report_pending()
        self._pending = done

    def _take_split(self, clock: BackwardClock) -> None:
        """Add the times of the last backward to its iteration: the pending one, if this is the
        first synchronized forward since the step, otherwise the current one."""
        times = clock.new_times()
        if times is None:
            return
        split = (self._pending or self._done).split
        assert split is not None
        split.sent_s += times[0]
        split.waited_s += times[1]
        split.measured = True
        self._report_pending()

    def _report_pending(self) -> None:
        """Tell the observers of the pending iteration. Without times of its backward, estimate the
        wait as the measured time of backward minus the profiled compute."""
        done, self._pending = self._pending, None
        if done is None or done.split is None:
            return
        if not done.split.measured and self._backward_s is not None:
            seconds, marks = self._cluster.device.seconds, done.marks
            if marks.forward_end is not None:
                took_s = seconds(marks.backward_end) - seconds(marks.forward_end)
                done.split.waited_s = done.split.sent_s = max(0.0, took_s - self._backward_s)
        self.observers.ended(done)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        self._cluster.control.set_activity("in consolidate")
        with self._cluster.control.joint_call("consolidate"):
            if repairing:
                repair(self._model, self._optimizer, self._cluster)
            else:
                require_equal(self._model, "ddp", self._cluster)
                average_replicas(self._model, self._cluster)
        self._cluster.control.set_activity(IN_SCRIPT)

    def traffic(self) -> dict[str, int]:
        # DDP averages every gradient in every iteration.
        sent = self._bytes_per_iteration * self._done.number
        return {next(iter(self._cluster.links)): sent}

    def _disconnect(self) -> None:
        self._report_pending()
        del self.module


def open_ddp_session(
    job: TrainingJob, bucket_cap_mb: float | None, strategy: str, plan: Plan | None
) -> DDPSession:
    """Return the session of torch's own DDP.

    Args:
        job: objects of this rank.
        bucket_cap_mb: DDP's option of the same name.
        strategy: name and settings for the record.
        plan: description of DDP for the record.
    """
    session = DDPSession(job, bucket_cap_mb)
    if job.recorder:
        job.recorder.start(strategy, plan, 0, job.profile)
    job.open_connections()
    session.begin()
    return session
