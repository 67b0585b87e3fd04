"""Session of a worker that steps its own optimizer and exchanges changes with the servers."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.core.runtime.iteration import MomentTimes
from offbeat.server.outer_rules import WEIGHT
from offbeat.server.session import SSPSession


class DiLoCoSession(SSPSession):
    """Session that trains `period` iterations from the servers' parameters, then pushes the change.

    The next iteration waits for the servers' parameters after the push.
    """

    _strategy: Any  # PSDiLoCo
    _anchor: dict[torch.dtype, torch.Tensor] | None = None  # parameters of the last pull
    _pushed = False  # a change was pushed since the last pull
    _trained = 0  # local steps since the last push

    def _update(self, skip_update: bool) -> None:
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # read by schedulers
        if not skip_update:
            self._require_acceptable_gradients(self._held)
            self._optimizer.step()
            self._trained += 1
            if self._pace is not None:
                self._pace.on_model_update()
        self._waiting += 1
        self._done.marks.stepped = self._cluster.device.mark()
        if self._waiting == self._strategy.accumulate:
            self._push()
        self._open = self._fresh = False
        if not self._waiting:
            self._refresh()

    def _push(self) -> None:
        """Push the change since the last pull, or skip the clock without a step."""
        count, self._trained, self._waiting = self._trained, 0, 0
        self._client.settle()
        self._pushed = True
        if count == 0:
            self._client.push([], skip=True)
            return
        assert self._anchor is not None
        with torch.no_grad():
            torch._foreach_copy_(self._outgoing, list(self._held), non_blocking=True)
            self._cluster.device.finish()  # the host reads the views
            for dtype, flat in self._client.outgoing.items():
                torch.sub(self._anchor[dtype], flat, out=flat)
        weight = self._strategy.weight(self._cluster.control.rank, count)
        self._client.push([{WEIGHT: weight}] * len(self._known))

    @property
    def _needed_clock(self) -> int:
        """Version of the parameters that the next iteration needs."""
        return self._low + 1 if self._pushed and self._strategy.waits_for_steps else 0

    def _refresh(self) -> None:
        """Request the parameters after the push."""
        if self._pushed and not self._client.pulling:
            self._client.pull(self._needed_clock)

    def _await_parameters(self) -> None:
        """Wait for the parameters after the last push, if an iteration begins."""
        if self._open:
            return
        self._open = True
        if self._waiting or not self._pushed:
            return
        begin = self._cluster.device.mark()
        self._refresh()
        self._load_pulled()
        if self._recorder:
            waited = self._cluster.device.mark()
            self._done.marks.acted.append(MomentTimes(0, begin, waited, waited))

    def _copy_incoming(self, low: int) -> None:
        super()._copy_incoming(low)
        if self._anchor is None:
            self._anchor = self._client.layout.flats()
        for dtype, flat in self._client.incoming.items():
            self._anchor[dtype].copy_(flat)
        self._pushed = False

    def _fetch_state(self) -> None:
        """The user's optimizer has its own state."""
