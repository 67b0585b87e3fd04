"""Timing single messages within a budget, with results that are the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.collectives import Collective
from offbeat.core.transport.device import Device


class Prober(Protocol):
    """What measuring needs of a group; tests have one with a clock of its own.

    `agreement_s`: seconds of agreements here that no budget has paid yet.
    """

    agreement_s: float

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    def now(self) -> float:
        """Seconds on this rank's clock."""
        ...

    def send(self, collective: Collective, size_bytes: int) -> float:
        """Seconds that one message took here."""
        ...

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, by rank."""
        ...


class Probe:
    """Sends messages on one group, in tensors like those that training sends."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor, device: Device):
        self._group, self._like, self._device = group, like, device
        self._buffer = like.new_ones(0)
        self.agreement_s = 0.0

    @property
    def ranks(self) -> int:
        return self._group.size()

    def now(self) -> float:
        return time.perf_counter()

    def send(self, collective: Collective, size_bytes: int) -> float:
        count = max(1, size_bytes // self._like.element_size())
        if count > self._buffer.numel():
            self._buffer = self._like.new_ones(count)
        self._device.finish()
        start = self.now()
        collective(self._buffer[:count])
        self._device.finish()
        return self.now() - start

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        start = self.now()
        rows = torch.zeros(self._group.size(), len(values), dtype=torch.float64, device="cpu")
        rows[self._group.rank()] = torch.tensor(values, dtype=torch.float64, device="cpu")
        rows = rows.to(self._like.device)
        # A sum in which all but one are 0 is exact, and gloo can do it on a GPU too.
        dist.all_reduce(rows, group=self._group)
        everyone = rows.tolist()
        self.agreement_s += self.now() - start
        return everyone


class Budget:
    """What measuring may spend: seconds, and bytes of payload that each rank sends.

    All ranks hold equal numbers at all times, so that they stop together.
    """

    def __init__(self, seconds: float, size_bytes: float, parent: Budget | None = None):
        self.seconds = self._whole_s = seconds
        self.size_bytes = self._whole_bytes = size_bytes
        self._parent = parent

    def share(self, part: float) -> Budget:
        """This part of the whole, at most what is left; what it pays, this one pays."""
        return Budget(
            max(0.0, min(self.seconds, part * self._whole_s)),
            max(0.0, min(self.size_bytes, part * self._whole_bytes)),
            self,
        )

    def allow(self, seconds: float) -> None:
        """So many seconds in all, if they are more than they were."""
        more_s = max(0.0, seconds - self._whole_s)
        self.seconds += more_s
        self._whole_s += more_s

    def pay(self, seconds: float, size_bytes: float) -> None:
        """Take what has been spent."""
        self.seconds -= seconds
        self.size_bytes -= size_bytes
        if self._parent is not None:
            self._parent.pay(seconds, size_bytes)

    def times(self, seconds: float, size_bytes: float) -> int:
        """How often something of this cost can still be paid."""
        return int(max(0.0, min(self.seconds / max(seconds, 1e-9), self.size_bytes / size_bytes)))


def timed(
    probe: Prober, collective: Collective, sizes: Sequence[int], budget: Budget
) -> list[float]:
    """Seconds of one message of each size, means over ranks.

    Paid is the time of the slowest rank, with the agreements before.
    """
    start, probe.agreement_s = probe.now() - probe.agreement_s, 0.0
    mine = [probe.send(collective, size) for size in sizes]
    everyone = probe.agree([*mine, probe.now() - start])
    *columns, spent_s = zip(*everyone, strict=True)
    budget.pay(max(spent_s), sum(sizes))
    return [fmean(column) for column in columns]
