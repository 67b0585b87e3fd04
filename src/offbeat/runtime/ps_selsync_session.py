"""The session of PSSelSync's workers: local steps, votes, and means that servers make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.numerics.change import Course, says
from offbeat.runtime.hooks import AfterBackward
from offbeat.runtime.served_session import ServedSession, Worker
from offbeat.strategies import PSSelSync

SYNC = PSSelSync.votes[0]


class PSSelSyncSession(ServedSession):
    """Steps with the user's optimizer. The first server brings the votes together, and all of them
    make means of what is pushed after a yes."""

    def __init__(self, worker: Worker, strategy: PSSelSync, workers: int):
        super().__init__(worker)
        self._strategy, self._workers = strategy, workers
        self._course = Course.of(strategy.window, min(1.0, workers / 100))
        self._trained = [t for t in self._held if t.requires_grad]
        self._norm: float | None = None  # squared, of this iteration's gradients
        self._handles.append(AfterBackward(self._trained, self._measure))

    # ---- what the user calls ----------------------------------------------------------------

    def _begin(self) -> None:
        """There is nothing to wait for."""

    def _end(self, skip_update: bool) -> None:
        if self._norm is None:  # no backward
            self._measure()
        steps = not skip_update and self._acceptable()
        if self._strategy.aggregate == "parameters":
            self._step(steps)
            self._agree()
            if self._synchronizes():
                self._average()
        else:
            mine = [steps and t.grad is not None for t in self._trained]
            used = self._agree(mine)
            if self._synchronizes() and any(used):
                self._average_gradients(steps, used)
                steps = True
            self._marks.waited = self._marks.step = self._cluster.device.mark()
            if self._pace is not None:
                self._pace.waited()
            self._step(steps)
        self._norm = None
        size, sent = self._client.layout.bytes, self._synchronizes()
        self._done.pushed_bytes, self._done.spared_bytes = (size, 0) if sent else (0, size)

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        self._average()
        self._unite_buffers()

    # ---- the vote ---------------------------------------------------------------------------

    def _measure(self) -> None:
        """Backward is over: what the user does to gradients after it, such as clipping, has no
        say."""
        self._densify()
        norms = [torch.linalg.vector_norm(t.grad) for t in self._trained if t.grad is not None]
        self._norm = float(sum(norm.double().square() for norm in norms))

    def _agree(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Have a say in this iteration's vote; which of the flags are set on any worker."""
        assert self._norm is not None
        change = self._course.change(self._norm, self._strategy.smooth)
        says_ = [False] * self._workers
        says_[self._cluster.control.rank] = says(change, self._strategy.delta)
        found = (
            self._client.meet(torch.tensor([*says_, *flags], dtype=torch.float64, device="cpu")) > 0
        )
        heard = found.tolist()
        self._done.shown[SYNC] = {"norm": self._norm, "change": change}
        self._done.voted[SYNC] = [r for r in range(self._workers) if heard[r]]
        return heard[self._workers :]

    def _synchronizes(self) -> bool:
        """Whether any worker has said yes."""
        return bool(self._done.voted[SYNC])

    # ---- means ------------------------------------------------------------------------------

    def _average(self) -> None:
        """What the servers hold a place for becomes its mean over workers."""
        self._exchange(self._held)
        with torch.no_grad():
            torch._foreach_copy_(list(self._held), self._incoming)

    def _average_gradients(self, brings: bool, used: Sequence[bool]) -> None:
        """Gradients become their means over the workers that bring some; those that nobody has
        `used` stay away from the step."""
        mine = [torch.zeros_like(t) if t.grad is None else t.grad for t in self._trained]
        self._exchange(mine, brings)
        for t, mean, anybody in zip(self._trained, self._incoming, used, strict=True):
            t.grad = mean.to(t.device, copy=True) if anybody else None

    def _exchange(self, mine: Sequence[Tensor], brings: bool = True) -> None:
        """Push, and have the mean of all workers in `incoming`."""
        self._client.settle()
        with torch.no_grad():
            torch._foreach_copy_(self._outgoing, list(mine))
        self._client.push([{}], skip=not brings)
        self._client.pull(self._client.clock)
        self._client.await_arrival()
        self._client.consume()

    def _step(self, steps: bool) -> None:
        """The user's optimizer, if it may."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers look at it
        if steps:
            self._optimizer.step()
            if self._pace is not None:
                self._pace.updated_whole()
        self._marks.stepped = self._cluster.device.mark()
