"""Asynchronous sends and receives of tensors between processes, over gloo."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    tensors: list[Tensor]  # kept until they have been sent
    gone: Callable[[], None] | None


class Exchange:
    """Asynchronous sends and receives over gloo.

    Two ranks must start the transfers between them in the same order. Gloo reads and writes host
    memory, so tensors of other devices are copied to and from the host.
    """

    def __init__(self, timeout_s: float):
        self.control = Control(timeout_s)
        self.group: dist.ProcessGroup | None = new_group("gloo", timeout_s)
        self._timeout_s = timeout_s
        self._sent: deque[_Sent] = deque()
        self._arrivals: WeakSet[Arrival] = WeakSet()

    @property
    def open_group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError after a failure, which has closed it."""
        if self.group is None:
            raise RuntimeError("this worker has failed; start it again")
        return self.group

    def receive(self, tensors: Sequence[Tensor], source: int, words: str) -> Arrival:
        """Start receiving `tensors` from a rank. `words` name the transfer in errors."""
        arrival = Arrival(self, tensors, source, words)
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
        """Start sending tensors in a time step. Do not write them before the call of `gone`.

        `settle` calls `gone` once the tensors have been sent. `words` name the transfer in errors.
        """
        hosted = [tensor.detach().to(HOST).contiguous() for tensor in tensors]
        group = self.open_group  # a failure that was reported before is not reported again
        with self.reporting(f"{words} to rank {target}"):
            works = [group.send([tensor], target, 0) for tensor in hosted]
        self._sent.append(_Sent(time, words, target, works, hosted, gone))

    def settle(self, before: int) -> None:
        """Wait for the end of all sends that were started before a time step."""
        while self._sent and self._sent[0].time < before:
            sent = self._sent[0]
            self.wait(sent.works, f"{sent.words} to rank {sent.target}")
            self._sent.popleft()
            if sent.gone is not None:
                sent.gone()

    def wait(self, works: list[Any], words: str) -> None:
        """Wait for operations and remove them from `works`.

        After a failure or timeout, closes the group and raises RuntimeError with the suspects.
        """
        with self.reporting(words):
            while works:
                works[0].wait(timedelta(seconds=self._timeout_s))
                works.pop(0)

    @contextmanager
    def reporting(self, words: str) -> Iterator[None]:
        """Report a failed operation of the body as `wait` does.

        An operation fails at its start if the connection to the peer is closed by then.
        """
        begun_s = time.monotonic()
        try:
            with self.control.waiting(f"waiting for {words}"):
                yield
        except RuntimeError as error:
            self._close_connections()
            why = self.control.report_failure(waited_s=time.monotonic() - begun_s)
            raise RuntimeError(
                f"rank {self.control.rank}: {words} failed: {error}. {why}"
            ) from error

    def _close_connections(self) -> None:
        """Close all connections, so that waits of other ranks for this one fail at once.

        They close once nothing refers to the group, not even an operation under way.
        """
        for works in [*(sent.works for sent in self._sent), *(a.works for a in self._arrivals)]:
            works.clear()
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)


class Arrival:
    """Tensors that are being received."""

    def __init__(self, exchange: Exchange, tensors: Sequence[Tensor], source: int, words: str):
        self._exchange, self._source, self._words = exchange, source, words
        self._tensors = [*tensors]
        self._hosted = [
            tensor if tensor.device == HOST else torch.empty_like(tensor, device=HOST)
            for tensor in tensors
        ]
        group = exchange.open_group
        with exchange.reporting(f"{words} from rank {source}"):
            self.works = [group.recv([tensor], source, 0) for tensor in self._hosted]

    def wait(self) -> list[Tensor]:
        """Wait for all tensors and return them."""
        self._exchange.wait(self.works, f"{self._words} from rank {self._source}")
        for tensor, host in zip(self._tensors, self._hosted, strict=True):
            if tensor is not host:
                tensor.copy_(host)
        return self._tensors
