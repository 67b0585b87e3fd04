"""The session of SSP's workers: push, pull, and never too far ahead."""

from __future__ import annotations

import time

import torch

from offbeat.core.runtime.attached import UncopiedHook
from offbeat.core.runtime.iteration import MomentTimes
from offbeat.server.optimizers import put_state, settings_of
from offbeat.server.session import ServedSession, Worker
from offbeat.strategies import SSP

BEFORE = (
    "load it before offbeat.prepare on every rank: afterwards the servers hold parameters and "
    "optimizer state"
)


class SSPSession(ServedSession):
    """Trains on a copy of the servers' parameters, which is refreshed between iterations.

    Within an iteration parameters do not change. Whoever reads them between two iterations sees
    the servers' newest ones.
    """

    def __init__(self, worker: Worker, strategy: SSP):
        super().__init__(worker)
        self._strategy = strategy
        self._before = strategy.iterations_at(worker.client.resumed + worker.client.clock)
        self._known = [frozenset(g) for g in settings_of(self._optimizer)]  # to the servers too
        self._low = 0  # pushes of smaller clocks are in the parameters here
        self._collected = 0  # iterations whose gradients are in `outgoing`
        self._waiting = 0  # iterations of this clock so far
        self._absent = [0] * len(self._held)
        self._open = False  # an iteration has begun
        self._fresh = False  # the parameters here are the newest that this worker knows of
        refuse, flush = UncopiedHook(self._refuse_load), UncopiedHook(self.flush)
        model, optimizer = self._model, self._optimizer
        begin = UncopiedHook(self._begin_bare)
        self._handles.append(model.register_forward_pre_hook(begin))
        self._handles.append(model.register_load_state_dict_pre_hook(refuse))
        self._handles += [m.register_state_dict_pre_hook(flush) for m in model.modules()]
        self._handles.append(optimizer.register_load_state_dict_pre_hook(refuse))
        self._handles.append(
            optimizer.register_state_dict_pre_hook(UncopiedHook(self._fetch_state))
        )
        self.flush()

    # ---- what the user calls ----------------------------------------------------------------

    def _end(self, skip_update: bool) -> None:
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers look at it
        if not skip_update:
            self._collect()
        self._waiting += 1
        if self._waiting == self._strategy.accumulate:
            self._push()
        self._marks.stepped = self._cluster.device.mark()
        self._open = self._fresh = False
        if not self._waiting:
            self._refresh()

    def note_forward(self, output: object) -> None:
        self._open = True  # with the newest parameters

    def flush(self) -> None:
        """Have the servers' newest parameters, unless an iteration is under way; such as the next
        one could begin with."""
        if not (self._open or self._fresh or self._waiting or self._cluster.closed):
            self._newest(max(self._need, 0))

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        if self._waiting:
            self._push()
        self._client.settle()
        self._unite_buffers()  # whoever has met has pushed
        self._newest(0)  # nobody waits for who has made more iterations
        self._open = False
        self._client.meet(
            torch.empty(0, dtype=torch.float64, device="cpu")
        )  # nobody pushes before everybody has pulled

    def optimizer_reloaded(self) -> None:
        self._refuse_load()

    def _leave(self) -> None:
        self._open = False
        self.flush()

    # ---- gradients to the servers -----------------------------------------------------------

    def _collect(self) -> None:
        """Take this iteration's gradients; the first ones wait until the last push is in."""
        if not self._collected:
            self._client.settle()
            self._absent = [0] * len(self._held)
        if not self._acceptable():
            return
        views, gradients = [], []
        for number, (p, view) in enumerate(zip(self._held, self._outgoing, strict=True)):
            if p.grad is not None:
                views.append(view)
                gradients.append(p.grad.detach())
                continue
            self._absent[number] += 1
            if not self._collected:
                view.zero_()
        if views:
            act = torch._foreach_add_ if self._collected else torch._foreach_copy_
            act(views, gradients)
        self._collected += 1

    def _push(self) -> None:
        """End this clock."""
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
    def _need(self) -> int:
        return self._client.clock - self._strategy.s

    def _refresh(self) -> None:
        """Take the parameters that have arrived, and ask for newer ones."""
        if self._client.arrived() is not None:
            self._take()
        if not self._client.pulling:
            self._client.pull(max(self._need, 0))

    def _begin(self) -> None:
        """An iteration begins: with parameters that are not too old."""
        if self._open:
            return
        self._open = True
        if self._waiting:  # in the middle of a clock
            return
        begin = time.perf_counter()
        self._refresh()
        while self._low < self._need:
            self._take()
            self._refresh_if_old()
        waited = time.perf_counter()
        if self._recorder:
            self._marks.acted.append(MomentTimes(0, begin, waited, waited))

    def _begin_bare(self) -> None:
        """A forward, which may be one of the user's bare module."""
        if torch.is_grad_enabled() and self._model.training and not self._cluster.closed:
            self._begin()

    def _refresh_if_old(self) -> None:
        if self._low < self._need and not self._client.pulling:
            self._client.pull(self._need)

    def _newest(self, need: int) -> None:
        """Take what the servers have now, with every push of clocks below `need`."""
        self._client.settle()
        if self._client.pulling:  # asked for before now
            if need == 0:
                self._client.hurry()
            self._client.await_arrival()
            self._client.consume()
        self._client.pull(need)
        self._take()
        self._fresh = True

    def _take(self) -> None:
        """Wait for what was asked for, and train on it."""
        self._client.await_arrival()
        low = self._client.arrived()
        assert low is not None
        with torch.no_grad():
            torch._foreach_copy_(list(self._held), self._incoming)
        self._low = max(self._low, low)
        self._client.consume()

    # ---- the rest ---------------------------------------------------------------------------

    def _fetch_state(self) -> None:
        """The servers' optimizer state, into the user's optimizer."""
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
            raise ValueError(f"the checkpoint came too late; {BEFORE}")
