"""Training session with gossip: optimizer steps of the user, and exchanges in another thread."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat.core.buckets.attached import UncopiedHook
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.guards.unwritten_weights import WeightChanges
from offbeat.core.runtime.session import Position
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.gossip.startup import GossipSetup, join
from offbeat.gossip.strategies import Gossip as GossipStrategy
from offbeat.gossip.worker import Gossip
from offbeat.jobs.replica_sample import Sample
from offbeat.sessions.loop_session import LoopSession

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace

WARM_UP = 2  # first iterations, whose gradient times are not recorded


class GossipSession(LoopSession):
    """Session that trains the parameters of this worker, while a thread exchanges them with
    neighbours.

    Code that reads the parameters between two iterations receives them mixed up to that time.
    Buffers differ between workers until `consolidate`, which averages parameters and buffers over
    all live workers.
    """

    alone = True
    receivers = "its neighbours"

    def __init__(
        self,
        job: TrainingJob,
        joined: GossipSetup,
        pace: Pace | None,
    ):
        model, watch = job.model, ParameterWatch(job.model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        watch.attach(self._parameters, placed=False)
        super().__init__(job, pace, watch)
        self._flats, self._state = joined.flats, joined.state
        self._clock, self._gossip = joined.clock, joined.gossip
        if job.recorder:
            job.recorder.set_sample(partial(Sample, self._flats))
        self._untouched = WeightChanges(model)
        self._untouched.note()
        self._open = False  # whether an iteration is in progress
        self._united = 0  # number of the iteration after the last `consolidate`
        # end of the last iteration; None after an interruption
        self._stepped_s: float | None = None
        self._began_s: float | None = None  # start of the forward of this iteration
        flush, load = UncopiedHook(self.flush), UncopiedHook(self._before_load)
        self._handles += [m.register_state_dict_pre_hook(flush) for m in model.modules()]
        self._handles.append(model.register_load_state_dict_pre_hook(load))
        self._handles.append(model.register_forward_pre_hook(UncopiedHook(self._on_forward)))
        loaded = UncopiedHook(self._after_load)
        self._handles.append(model.register_load_state_dict_post_hook(loaded))

    # ---- calls of the user ------------------------------------------------------------------

    def note_forward(self, output: object) -> None:
        self._open = True

    def _update(self, skip_update: bool) -> None:
        if self._gossip is not None:
            self._gossip.resume()
        self._report_notices()
        if not skip_update:
            self._require_acceptable_gradients(self._parameters)
            self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers look at it
            self._require_untouched()
            self._state.step(self._clock.now(), self._optimizer.step)
            self._untouched.note()
            self.observers.updated(self._done, None)
        self._open = False
        self._record_gradient_time()

    def flush(self) -> None:
        """Mix the parameters up to the present, unless an iteration is in progress."""
        if not (self._open or self._cluster.closed):
            self._stepped_s = None
            self._state.mix_until(self._clock.now())

    @property
    def exchanges(self) -> Mapping[int, int]:
        """Completed exchanges of this worker so far, by the rank of the other worker."""
        return {} if self._gossip is None else self._gossip.counts.exchanges

    def traffic(self) -> dict[str, int]:
        sent = self._gossip.bytes_sent if self._gossip is not None else 0
        return dict.fromkeys(list(self._cluster.links)[:1], sent)

    def consolidate(self, repairing: bool) -> None:
        """Pause gossip. Set x and x~ to the average of (x + x~)/2 over workers, and buffers to
        their average.
        """
        self._cluster.require_open()
        self._require_untouched()
        self._open, self._stepped_s, self._united = False, None, self._done.number
        if self._gossip is None:
            self.flush()
            return
        with self._gossip.consolidation():
            self._average(self._gossip)
        self._report_notices()

    def _average(self, gossip: Gossip) -> None:
        nothing = [torch.zeros(1, dtype=torch.float32, device="cpu")]
        # other workers may exchange with this worker until they begin this reduction
        gossip.all_reduce(nothing)
        t = gossip.pause_all(max(self._clock.now(), self._state.t))
        self._state.midpoint()
        buffers = [b.detach().cpu().double() for b in self._buffers()]
        numbers = [*map(_summand, self._flats), *buffers]
        sums, _, workers = gossip.all_reduce([n.reshape(-1) for n in numbers])
        # No worker leaves before all workers have the same bits.
        means = gossip.agree_on_means([total / workers for total in sums])
        self._state.set_parameters(means[: len(self._flats)], t)
        self._set_buffers(means[len(self._flats) :])

    def _leave(self) -> None:
        self._open = False
        self.flush()
        # A process that has joined a running job has no links.
        if self._gossip is not None and self._cluster.links and self._done.number != self._united:
            self._print_difference()

    def _disconnect(self) -> None:
        if self._gossip is None:
            return
        self._gossip.close()
        if self._recorder:
            counts, origin_s = self._gossip.counts, self._recorder.origin_s
            self._recorder.notes["gossip"] = {
                "exchanges": {str(peer): count for peer, count in counts.exchanges.items()},
                "broken": counts.broken,
                "exchange_s": counts.exchange_s,
                "unit_s": self._clock.unit_s,
                "origin_s": origin_s + self._clock.ahead_s,  # on the common clock
                "last": counts.last_exchanges(origin_s),
            }

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

    def _report_notices(self) -> None:
        """Raise the error of the gossip thread, and issue its notices as warnings."""
        if self._gossip is None:
            return
        self._gossip.check()
        for words in self._gossip.take_notices():
            if self._recorder:
                self._recorder.decide(self._done.number, words, None)
            warnings.warn(words, RuntimeWarning, stacklevel=4)

    def _require_untouched(self) -> None:
        for name in self._untouched.changed_names()[:1]:
            raise RuntimeError(
                f"parameter {name!r} was changed outside of optimizer.step(): gossip would lose "
                "some of that, as x~ and exchanges under way do not know of it; change it in "
                "optimizer.register_step_post_hook, have one optimizer for all parameters, or load "
                "with model.load_state_dict"
            )

    # ---- checkpoints ------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self._cluster.control.rank if self._gossip is None else self._gossip.me

    def capture_position(self) -> Position:
        self._cluster.require_open()
        self._require_untouched()
        if self._open:
            raise RuntimeError(
                "an iteration is under way; save between iterations: after optimizer.step() and "
                "before the next forward in training mode"
            )
        return Position(self.iteration, alike=False)

    def _before_load(self) -> None:
        if not self._cluster.closed:
            self._open = False
            self.flush()

    def _after_load(self) -> None:
        if not self._cluster.closed:
            self._untouched.note()
            self._united = self._done.number
            self._state.set_parameters(self._flats, self._clock.now())


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
    return GossipSession(job, joined, pace)
