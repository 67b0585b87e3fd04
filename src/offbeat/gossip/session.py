"""Training session with gossip: optimizer steps of the user, and exchanges in another thread."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat.core.guards.finite import OnNonfinite, all_finite
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.guards.unwritten_weights import WeightChanges
from offbeat.core.measuring.replica_sample import Sample
from offbeat.core.runtime.attached import UncopiedHook
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.prepared import Position, Session
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.transport.cluster import Cluster
from offbeat.gossip.startup import GossipSetup, join
from offbeat.gossip.strategies import Gossip as GossipStrategy
from offbeat.gossip.worker import Gossip

if TYPE_CHECKING:
    from offbeat.experiments.record.recorder import Recorder
    from offbeat.lab.pace import Pace

WARM_UP = 2  # first iterations, whose gradient times are not recorded


class GossipSession(Session):
    """Session that trains the parameters of this worker, while a thread exchanges them with
    neighbours.

    Code that reads the parameters between two iterations receives them mixed up to that time.
    Buffers differ between workers until `consolidate`, which averages parameters and buffers over
    all live workers.
    """

    alone = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        joined: GossipSetup,
        cluster: Cluster,
        recorder: Recorder | None,
        on_nonfinite: OnNonfinite,
        pace: Pace | None = None,
    ):
        self._pace = pace
        if pace is not None:
            pace.attach_backward_hooks(model)
        self._model, self._optimizer = model, optimizer
        self._flats, self._state = joined.flats, joined.state
        self._clock, self._gossip = joined.clock, joined.gossip
        self._cluster, self._recorder = cluster, recorder
        if recorder and not recorder.notes.get("emulated"):
            recorder.sample = Sample(self._flats)
        self._on_nonfinite: OnNonfinite = on_nonfinite
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._watch = ParameterWatch(model)
        self._watch.attach(self._parameters, placed=False)
        self._untouched = WeightChanges(
            (n, p) for n, p in model.named_parameters() if p.requires_grad
        )
        self._open = False  # whether an iteration is in progress
        self._before = 0  # iterations of the run before this process
        self._listener: Callable[[Iteration], None] | None = None
        # end of the last iteration; None after an interruption
        self._stepped_s: float | None = None
        self._began_s: float | None = None  # start of the forward of this iteration
        self._done = Iteration(0, self._new_marks(), [])
        flush, load = UncopiedHook(self.flush), UncopiedHook(self._before_load)
        self._handles: list[Any] = [m.register_state_dict_pre_hook(flush) for m in model.modules()]
        self._handles.append(model.register_load_state_dict_pre_hook(load))
        self._handles.append(model.register_forward_pre_hook(UncopiedHook(self._on_forward)))
        loaded = UncopiedHook(self._after_load)
        self._handles.append(model.register_load_state_dict_post_hook(loaded))

    # ---- calls of the user ------------------------------------------------------------------

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._watch.require_unchanged()
        training = torch.is_grad_enabled() and self._model.training
        if training:
            self._cluster.require_open()
        pace = self._pace if training else None
        if pace is not None:
            pace.on_iteration_begin(self._done.number, self._done.marks.begin)
        if training:
            self._begin_iteration()
        else:
            self.flush()
        mark = self._cluster.device.mark
        self._done.marks.forward = mark()
        output = call(*args, **kwargs)
        if pace is not None:
            pace.forward(-1)
        self._done.marks.forward_end = mark()
        return output

    def note_forward(self, output: object) -> None:
        self._open = True

    def step(self, skip_update: bool) -> None:
        self._cluster.require_open()
        marks, mark = self._done.marks, self._cluster.device.mark
        marks.backward_end = marks.waited = marks.step = mark()
        marks.ready = [marks.backward_end]
        if self._gossip is not None:
            self._gossip.resume()
        self._report_notices()
        if not skip_update and self._has_acceptable_gradients():
            self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers look at it
            self._require_untouched()
            self._state.step(self._clock.now(), self._optimizer.step)
            self._untouched.note()
            if self._pace is not None:
                self._pace.on_model_update()
        marks.stepped = marks.end = mark()
        self._open = False
        self._record_gradient_time()
        self._end_iteration()

    def zero_grad(self, set_to_none: bool) -> None:
        self._model.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # backward never communicates

    def flush(self) -> None:
        """Mix the parameters up to the present, unless an iteration is in progress."""
        if not (self._open or self._cluster.closed):
            self._stepped_s = None
            self._state.mix_until(self._clock.now())

    def traffic(self) -> dict[str, int]:
        sent = self._gossip.bytes_sent if self._gossip is not None else 0
        return dict.fromkeys(list(self._cluster.links)[:1], sent)

    def listen(self, listener: Callable[[Iteration], None]) -> None:
        self._listener = listener

    def consolidate(self, repairing: bool) -> None:
        """Pause gossip. Set x and x~ to the average of (x + x~)/2 over workers, and buffers to
        their average.
        """
        self._cluster.require_open()
        self._require_untouched()
        self._open, self._stepped_s = False, None
        if self._gossip is None:
            self.flush()
            return
        with self._gossip.reduction_series():
            self._average(self._gossip)
        self._report_notices()

    def _average(self, gossip: Gossip) -> None:
        nothing = [torch.zeros(1, dtype=torch.float32, device="cpu")]
        # other workers may exchange with this worker until they begin this reduction
        gossip.all_reduce(nothing)
        t = gossip.pause_all(max(self._clock.now(), self._state.t))
        self._state.midpoint()
        buffers = [b for b in self._model.buffers() if b.numel()]
        numbers = [*map(_summand, self._flats), *(b.detach().cpu().double() for b in buffers)]
        sums, _, workers = gossip.all_reduce([n.reshape(-1) for n in numbers])
        # No worker leaves before all workers have the same bits.
        means = gossip.agree_on_means([total / workers for total in sums])
        self._state.set_parameters(means[: len(self._flats)], t)
        for buffer, mean in zip(buffers, means[len(self._flats) :], strict=True):
            exact = mean if buffer.is_floating_point() else mean.round()
            buffer.copy_(exact.view(buffer.shape))

    def close(self) -> None:
        if self._cluster.closed:
            return
        if getattr(sys, "last_value", None) is None:  # after an uncaught exception, exit at once
            self._open = False
            self.flush()
        if self._gossip is not None:
            self._gossip.close()
        self._watch.close()
        for handle in self._handles:
            handle.remove()
        if self._recorder:
            self._write_record(self._recorder)
        self._cluster.close()

    # ---- iterations -------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        """Begin an iteration at its first forward in training mode."""
        if self._open:
            return
        self._open, self._began_s = True, time.perf_counter()
        if self._gossip is not None:
            self._gossip.resume()
        self._state.refresh()

    def _on_forward(self) -> None:
        """Begin an iteration at a forward of the bare module.

        For a model that is trained in evaluation mode, only record the start of the forward.
        """
        if self._open or self._cluster.closed or not torch.is_grad_enabled():
            return
        if self._model.training:
            self._begin_iteration()
        self._began_s = time.perf_counter()

    def _record_gradient_time(self) -> None:
        """Record the time from step to step, or from forward to step after an interruption."""
        now, before = time.perf_counter(), self._stepped_s or self._began_s
        self._stepped_s, self._began_s = now, None
        if self._gossip is not None and before is not None and self._done.number >= WARM_UP:
            self._gossip.record_gradient(now - before)

    def _end_iteration(self) -> None:
        if self._recorder:
            self._recorder.on_step_begin(self._done.number)
            self._recorder.add_iteration(self._done)
            self._recorder.on_step_end(self._done.number)
        if self._listener is not None:
            self._listener(self._done)
        self._done = Iteration(self._done.number + 1, self._new_marks(), [])

    def _report_notices(self) -> None:
        """Raise the error of the gossip thread, and issue its notices as warnings."""
        if self._gossip is None:
            return
        self._gossip.check()
        for words in self._gossip.take_notices():
            if self._recorder:
                self._recorder.decide(self._done.number, words, None)
            warnings.warn(words, RuntimeWarning, stacklevel=4)

    def _has_acceptable_gradients(self) -> bool:
        """Return whether the gradients are finite or `on_nonfinite` permits other values."""
        if self._on_nonfinite == "ignore":
            return True
        if all_finite(p.grad for p in self._parameters if p.grad is not None):
            return True
        if self._on_nonfinite == "skip":
            return False
        raise RuntimeError(
            f"rank {self._cluster.control.rank} has a gradient with NaN or infinity in iteration "
            f"{self._done.number}, and its neighbours would get it; lower the learning rate, or "
            "on_nonfinite='skip'"
        )

    def _require_untouched(self) -> None:
        name = self._untouched.changed_name()
        if name is not None:
            raise RuntimeError(
                f"parameter {name!r} was changed outside of optimizer.step(): gossip would lose "
                "some of that, as x~ and exchanges under way do not know of it; change it in "
                "optimizer.register_step_post_hook, have one optimizer for all parameters, or load "
                "with model.load_state_dict"
            )

    # ---- checkpoints and records ------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self._cluster.control.rank if self._gossip is None else self._gossip.me

    @property
    def iteration(self) -> int:
        return self._before + self._done.number

    def capture_position(self) -> Position:
        self._cluster.require_open()
        self._require_untouched()
        if self._open:
            raise RuntimeError(
                "an iteration is under way; save between iterations: after optimizer.step() and "
                "before the next forward in training mode"
            )
        return Position(self.iteration, alike=False)

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        self._cluster.require_open()
        self._before = iteration - self._done.number

    def _before_load(self) -> None:
        if not self._cluster.closed:
            self._open = False
            self.flush()

    def _after_load(self) -> None:
        if not self._cluster.closed:
            self._untouched.note()
            self._state.set_parameters(self._flats, self._clock.now())

    def _new_marks(self) -> Timestamps:
        return Timestamps(begin=self._cluster.device.mark())

    def _write_record(self, recorder: Recorder) -> None:
        if self._gossip is not None:
            counts = self._gossip.counts
            recorder.notes["gossip"] = {
                "exchanges": {str(peer): count for peer, count in counts.exchanges.items()},
                "broken": counts.broken,
                "exchange_s": counts.exchange_s,
                "unit_s": self._clock.unit_s,
                "origin_s": recorder.origin_s + self._clock.ahead_s,  # on the common clock
                "last": counts.last_exchanges(recorder.origin_s),
            }
        recorder.pace = self._pace.record() if self._pace else None
        if traffic := self.traffic():
            recorder.write(traffic)


def _summand(flat: Tensor) -> Tensor:
    """Return a copy on the host to be summed, at least in float32."""
    numbers = flat.detach().to("cpu", copy=True)
    return numbers.float() if numbers.dtype.itemsize < 4 else numbers


def open_gossip_session(strategy: GossipStrategy, job: TrainingJob) -> GossipSession:
    """Return the session of a worker, connected to the other workers or to a running job."""
    pace = job.requested_pace()
    joined = join(job.model, job.optimizer, strategy, job.observation.model, job.cluster)
    if job.recorder:
        job.recorder.start(str(strategy), None, observed=0)
    policy = job.watch.on_nonfinite
    return GossipSession(job.model, job.optimizer, joined, job.cluster, job.recorder, policy, pace)
