"""Exchange: tensors from one process to another while both compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.control import Control, new_group

HOST = torch.device("cpu")


class _Sent(NamedTuple):
    time: int
    words: str
    target: int
    works: list[Any]
    tensors: list[Tensor]  # kept until they have gone
    gone: Callable[[], None] | None


class Exchange:
    """Sends and receives over gloo. Two ranks must call them in the same order.

    The network reads and writes the host's memory; tensors of other devices are copied.
    """

    def __init__(self, timeout_s: float):
        self.control = Control(timeout_s)
        self.group: dist.ProcessGroup | None = new_group("gloo", timeout_s)
        self._timeout_s = timeout_s
        self._sent: deque[_Sent] = deque()
        self._arrivals: WeakSet[Arrival] = WeakSet()

    @property
    def connected(self) -> dist.ProcessGroup:
        """The group; RuntimeError after a failure."""
        if self.group is None:
            raise RuntimeError("this worker has failed; start it again")
        return self.group

    def receive(self, landing: Sequence[Tensor], source: int, words: str) -> Arrival:
        """Be ready for tensors like these, which are overwritten."""
        arrival = Arrival(self, landing, source, words)
        self._arrivals.add(arrival)
        return arrival

    def send(
        self,
        time: int,
        tensors: Sequence[Tensor],
        target: int,
        words: str,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Send what tensors hold now; they must not be written before they have `gone`."""
        hosted = [tensor.detach().to(HOST).contiguous() for tensor in tensors]
        works = [self.connected.send([tensor], target, 0) for tensor in hosted]
        self._sent.append(_Sent(time, words, target, works, hosted, gone))

    def settle(self, before: int) -> None:
        """Wait until everything has gone that was sent before a time step."""
        while self._sent and self._sent[0].time < before:
            sent = self._sent[0]
            self.wait(sent.works, sent.target, f"{sent.words} to rank {sent.target}")
            self._sent.popleft()
            if sent.gone is not None:
                sent.gone()

    def wait(self, works: list[Any], peer: int, words: str) -> None:
        """Wait for operations with a peer, and forget them; RuntimeError naming who keeps us
        waiting."""
        begun_s = time.monotonic()
        try:
            with self.control.waiting(f"waiting for {words}"):
                while works:
                    works[0].wait(timedelta(seconds=self._timeout_s))
                    works.pop(0)
        except RuntimeError as error:
            self._hang_up()
            why = self.control.report_failure(waited_s=time.monotonic() - begun_s)
            raise RuntimeError(
                f"rank {self.control.rank}: {words} did not get through: {error}. {why} Start all "
                f"again from the last checkpoint, or raise timeout_s ({self._timeout_s:g} s) if a "
                "rank is only slow"
            ) from error

    def _hang_up(self) -> None:
        """Let those who wait for us know at once. Connections close when nothing refers to the
        group any more, operations under way included."""
        for works in [*(sent.works for sent in self._sent), *(a.works for a in self._arrivals)]:
            works.clear()
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)


class Arrival:
    """Tensors on their way to us."""

    def __init__(self, exchange: Exchange, landing: Sequence[Tensor], source: int, words: str):
        self._exchange, self._source, self._words = exchange, source, words
        self._landing = [*landing]
        self._hosted = [
            tensor if tensor.device == HOST else torch.empty_like(tensor, device=HOST)
            for tensor in landing
        ]
        self.works = [exchange.connected.recv([tensor], source, 0) for tensor in self._hosted]

    def wait(self) -> list[Tensor]:
        """The tensors, once all are there."""
        self._exchange.wait(self.works, self._source, f"{self._words} from rank {self._source}")
        for tensor, host in zip(self._landing, self._hosted, strict=True):
            if tensor is not host:
                tensor.copy_(host)
        return self._landing
