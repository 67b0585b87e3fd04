"""Asynchronous sends and receives of tensors between processes, over gloo."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.control import Control, new_group

HOST = torch.device("cpu")


@dataclass(eq=False)
class TensorTransfer:
    """Tensors that are being sent or received.

    Attributes:
        words: name of the transfer in errors.
        tensors: the tensors to receive into, or `hosted`.
        hosted: the same on the host, kept until they have been sent.
        works: operations that have not been waited for.
    """

    words: str
    tensors: Sequence[Tensor]
    hosted: Sequence[Tensor]
    works: list[Any] = field(default_factory=list)


class Exchange:
    """Asynchronous sends and receives over gloo.

    Two ranks must start the transfers between them in the same order. Gloo reads and writes host
    memory, so tensors of other devices are copied to and from the host.
    """

    def __init__(self, timeout_s: float):
        self.control = Control(timeout_s)
        self.group: dist.ProcessGroup | None = new_group("gloo", timeout_s)
        self._timeout_s = timeout_s
        # By time step, with the callback for the end.
        self._sent: deque[tuple[int, TensorTransfer, Callable[[], None] | None]] = deque()
        self._under_way: WeakSet[TensorTransfer] = WeakSet()

    @property
    def open_group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError after a failure, which has closed it."""
        if self.group is None:
            raise RuntimeError("this worker has failed; start it again")
        return self.group

    def receive(self, tensors: Sequence[Tensor], source: int, words: str) -> TensorTransfer:
        """Start receiving into tensors, which `complete` ends. `words` name them in errors."""
        hosted = [t if t.device == HOST else torch.empty_like(t, device=HOST) for t in tensors]
        transfer = TensorTransfer(f"{words} from rank {source}", tensors, hosted)
        return self._start(transfer, lambda group, tensor: group.recv([tensor], source, 0))

    def complete(self, arrival: TensorTransfer) -> Sequence[Tensor]:
        """Wait for the tensors that are being received and return them."""
        self._wait(arrival)
        for tensor, host in zip(arrival.tensors, arrival.hosted, strict=True):
            if tensor is not host:
                tensor.copy_(host)
        return arrival.tensors

    def send(
        self,
        time: int,
        tensors: Sequence[Tensor],
        target: int,
        words: str,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Start sending tensors in a time step. Do not write them before the call of `gone`.

        `settle` calls `gone` once the tensors have been sent. `words` name them in errors.
        """
        hosted = [tensor.detach().to(HOST).contiguous() for tensor in tensors]
        transfer = TensorTransfer(f"{words} to rank {target}", hosted, hosted)
        self._start(transfer, lambda group, tensor: group.send([tensor], target, 0))
        self._sent.append((time, transfer, gone))

    def settle(self, before: int) -> None:
        """Wait for the end of all sends that were started before a time step."""
        while self._sent and self._sent[0][0] < before:
            _, transfer, gone = self._sent[0]
            self._wait(transfer)
            self._sent.popleft()
            if gone is not None:
                gone()

    def _start(
        self, transfer: TensorTransfer, start: Callable[[dist.ProcessGroup, Tensor], Any]
    ) -> TensorTransfer:
        group = self.open_group  # a failure that was reported before is not reported again
        self._under_way.add(transfer)
        with self.reporting(transfer.words):
            transfer.works += [start(group, tensor) for tensor in transfer.hosted]
        return transfer

    def _wait(self, transfer: TensorTransfer) -> None:
        with self.reporting(transfer.words):
            while transfer.works:
                transfer.works[0].wait(timedelta(seconds=self._timeout_s))
                transfer.works.pop(0)

    @contextmanager
    def reporting(self, words: str) -> Iterator[None]:
        """Report a failed operation of the body: close the group and raise RuntimeError with the
        suspects. An operation fails at its start if the connection to the peer is closed by then.
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
        for transfer in self._under_way:
            transfer.works.clear()
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)
