"""Session of a worker with strategy SSP or PS-BSP."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from offbeat.core.buckets.attached import UncopiedHook
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.runtime.iteration import MomentTimes
from offbeat.core.runtime.session import Position
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.server.client import Client
from offbeat.server.optimizers import put_state, settings_of
from offbeat.server.serving import client_of, serve
from offbeat.server.strategies import NO_CHECKPOINT, SSP
from offbeat.sessions.loop_session import LoopSession

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace

NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")
MOST_NUMBERS = 1 << 17  # numbers of one average: 1 MiB, so that heartbeats pass between them
BEFORE = (
    "load it before offbeat.prepare on every rank: afterwards the servers hold parameters and "
    "optimizer state"
)


class SSPSession(LoopSession):
    """Session that trains on a copy of the servers' parameters.

    The copy is refreshed between iterations, never within one. `state_dict()` between two
    iterations returns the servers' newest parameters.
    """

    elsewhere = NO_CHECKPOINT
    receivers = "the servers"

    def __init__(self, strategy: SSP, job: TrainingJob, client: Client, pace: Pace | None):
        watch = ParameterWatch(job.model)
        watch.attach(p for p in job.model.parameters() if p.requires_grad)
        super().__init__(job, pace, watch)
        self._strategy, self._client, layout = strategy, client, client.layout
        if self._recorder:
            self._recorder.is_uneven = strategy.s > 0
        self._held = layout.parameters
        self._outgoing = layout.views(client.outgoing)
        self._incoming = layout.views(client.incoming)
        self._before = strategy.iterations_at(client.resumed + client.clock)
        # Names of the settings that the servers' optimizers have.
        self._known = [frozenset(g) for g in settings_of(self._optimizer)]
        self._low = 0  # the local parameters include all pushes of lower clocks
        self._collected = 0  # iterations whose gradients are in `outgoing`
        self._waiting = 0  # iterations of this clock so far
        self._absent = [0] * len(self._held)  # per parameter: iterations without gradient
        self._open = False  # an iteration has begun
        self._fresh = False  # no push since the local parameters were pulled
        refuse, flush = UncopiedHook(self._refuse_load), UncopiedHook(self.flush)
        model, optimizer = self._model, self._optimizer
        begin = UncopiedHook(self._on_forward)
        self._handles.append(model.register_forward_pre_hook(begin))
        self._handles.append(model.register_load_state_dict_pre_hook(refuse))
        self._handles += [m.register_state_dict_pre_hook(flush) for m in model.modules()]
        self._handles.append(optimizer.register_load_state_dict_pre_hook(refuse))
        self._handles.append(
            optimizer.register_state_dict_pre_hook(UncopiedHook(self._fetch_state))
        )
        self.flush()

    # ---- called by the user -----------------------------------------------------------------

    def _update(self, skip_update: bool) -> None:
        for p in self._held:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # pushes are flat tensors
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # read by schedulers
        if not skip_update:
            self._collect()
        self._waiting += 1
        if self._waiting == self._strategy.accumulate:
            self._push()
        self._done.marks.stepped = self._cluster.device.mark()
        self._open = self._fresh = False
        if not self._waiting:
            self._refresh()

    def note_forward(self, output: object) -> None:
        self._open = True  # a backward of `output` may follow: keep its parameters until `step`

    def flush(self) -> None:
        """Pull the servers' newest parameters unless an iteration or a clock is incomplete.

        Waits until they are new enough for the next iteration.
        """
        if not (self._open or self._fresh or self._waiting or self._cluster.closed):
            self._pull_newest(max(self._needed_clock, 0))

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        if self._waiting:
            self._push()
        self._client.settle()
        self._average_buffers()  # returns after the pushes of all workers
        self._pull_newest(0)  # 0: workers may have different numbers of iterations
        self._open = False
        self._client.average(NOTHING)  # a barrier: no push before all workers have pulled

    def optimizer_reloaded(self) -> None:
        self._refuse_load()

    def _average_buffers(self) -> None:
        """Average the model's buffers over all workers."""
        buffers = self._buffers()
        numbers = [b.detach().to("cpu", torch.float64).reshape(-1) for b in buffers]
        parts = torch.cat([*numbers, NOTHING]).split(MOST_NUMBERS)  # without numbers: one part
        means = torch.cat([self._client.average(part) for part in parts])
        self._set_buffers(means.split([b.numel() for b in buffers]) if buffers else [])

    def capture_position(self) -> Position:
        raise ValueError(NO_CHECKPOINT)

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        raise ValueError(NO_CHECKPOINT)

    def traffic(self) -> dict[str, int]:
        return {next(iter(self._cluster.links)): self._client.bytes_sent}

    def _leave(self) -> None:
        self._open = False
        with suppress(RuntimeError):  # lost servers have been reported already
            self.flush()

    def _disconnect(self) -> None:
        with suppress(RuntimeError):
            self._client.close()

    # ---- gradients to the servers -----------------------------------------------------------

    def _collect(self) -> None:
        """Add this iteration's gradients to `outgoing`, once the last push is acknowledged."""
        if not self._collected:
            self._client.settle()
            self._absent = [0] * len(self._held)
        self._require_acceptable_gradients(self._held)
        views, gradients = [], []
        for number, (p, view) in enumerate(zip(self._held, self._outgoing, strict=True)):
            if p.grad is not None:
                views.append(view)
                gradients.append(p.grad.detach())
                continue
            self._absent[number] += 1
            if not self._collected:
                view.zero_()
        if views and self._collected:
            hosted = [gradient.to("cpu", non_blocking=True) for gradient in gradients]
            self._cluster.device.finish()
            torch._foreach_add_(views, hosted)
        elif views:
            torch._foreach_copy_(views, gradients, non_blocking=True)
            self._cluster.device.finish()  # the client reads the bytes of the views
        self._collected += 1

    def _push(self) -> None:
        """Push the average gradient of this clock, or skip the clock without gradients."""
        count, self._collected, self._waiting = self._collected, 0, 0
        if count == 0:
            self._client.settle()
            self._client.push([], skip=True)
            return
        if count > 1:
            for flat in self._client.outgoing.values():
                flat /= count
        absent = [number for number, times in enumerate(self._absent) if times == count]
        settings = [
            {name: value for name, value in group.items() if name in known}
            for group, known in zip(settings_of(self._optimizer), self._known, strict=True)
        ]
        self._client.push(settings, absent)

    # ---- parameters from the servers --------------------------------------------------------

    @property
    def _needed_clock(self) -> int:
        return self._client.clock - self._strategy.s

    def _refresh(self) -> None:
        """Load pulled parameters that have arrived, and start the next pull."""
        if self._client.arrived_clock() is not None:
            self._load_pulled()
        if not self._client.pulling:
            self._client.pull(max(self._needed_clock, 0))

    def _begin_iteration(self) -> None:
        self._await_parameters()
        self.observers.waited()

    def _await_parameters(self) -> None:
        """Wait for parameters that are at most `s` clocks old, if an iteration begins."""
        if self._open:
            return
        self._open = True
        if self._waiting:  # parameters do not change within a clock
            return
        begin = self._cluster.device.mark()
        if self._client.arrived_clock() is not None:
            # Further parameters are pulled after the next push, unless these are too old.
            self._load_pulled()
            self._refresh_if_old()
        elif not self._client.pulling:
            self._client.pull(max(self._needed_clock, 0))
        while self._low < self._needed_clock:
            self._load_pulled()
            self._refresh_if_old()
        if self._recorder:
            waited = self._cluster.device.mark()
            self._done.marks.acted.append(MomentTimes(0, begin, waited, waited))

    def _on_forward(self) -> None:
        """Forward hook: the user may call the module instead of the prepared model."""
        if torch.is_grad_enabled() and self._model.training and not self._cluster.closed:
            self._await_parameters()

    def _refresh_if_old(self) -> None:
        if self._low < self._needed_clock and not self._client.pulling:
            self._client.pull(self._needed_clock)

    def _pull_newest(self, need: int) -> None:
        """Pull and load parameters that include all pushes of clocks below `need`."""
        self._client.settle()
        if self._client.pulling:  # started earlier, so its parameters may be older
            if need == 0:
                self._client.expedite_pull()
            self._client.await_arrival()
            self._client.release_incoming()
        self._client.pull(need)
        self._load_pulled()
        self._fresh = True

    def _load_pulled(self) -> None:
        """Wait for the pull and copy its parameters into the model."""
        self._client.await_arrival()
        low = self._client.arrived_clock()
        assert low is not None
        with torch.no_grad():
            torch._foreach_copy_(list(self._held), self._incoming, non_blocking=True)
        self._cluster.device.finish()  # the client overwrites the pulled parameters
        self._low = max(self._low, low)
        self._client.release_incoming()

    # ---- optimizer state --------------------------------------------------------------------

    def _fetch_state(self) -> None:
        """Copy the servers' optimizer state into the user's optimizer."""
        if self._cluster.closed:
            return
        self._client.settle()
        for number, values in self._client.state():
            spec = self._client.layout.shards[number]
            for place, name, value in values:
                piece = spec.pieces[place]
                p = self._held[piece.parameter]
                put_state(self._optimizer.state[p], p.detach(), piece, name, value)

    def _refuse_load(self) -> None:
        if not self._cluster.closed:
            raise ValueError(f"a checkpoint cannot be loaded now; {BEFORE}")


def open_served_session(strategy: SSP, job: TrainingJob) -> SSPSession:
    """Return the session of a worker.

    On a rank of a server, serve until all workers have left, then raise SystemExit(0).
    """
    if job.cluster.control.rank in job.ranks.servers:
        serve(strategy, job)
        raise SystemExit(0)
    pace = job.requested_pace()
    if job.recorder:
        job.recorder.start(str(strategy), None, observed=0)
    client = client_of(strategy, job)
    return SSPSession(strategy, job, client, pace)
