"""Timing of single messages within a budget, with the same results on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.transport.collectives import Collective
from offbeat.core.transport.device import Device


class Probe:
    """Sends messages in one group, as tensors of the dtype and device that training uses.

    `agreement_s` is the seconds of agreements on this rank that no budget has paid yet. Tests
    replace a probe by an object with the same methods and a simulated clock.
    """

    def __init__(self, group: dist.ProcessGroup, like: Tensor, device: Device):
        self._group, self._like, self._device = group, like, device
        self._buffer = like.new_ones(0)
        self.agreement_s = 0.0

    @property
    def ranks(self) -> int:
        """Return the number of ranks in the group."""
        return self._group.size()

    def read_clock(self) -> float:
        """Return the seconds of this rank's clock."""
        return time.perf_counter()

    def send(self, collective: Collective, size_bytes: int) -> float:
        """Send one message and return its seconds on this rank."""
        count = max(1, size_bytes // self._like.element_size())
        if count > self._buffer.numel():
            self._buffer = self._like.new_ones(count)
        self._device.finish()
        start = self.read_clock()
        collective(self._buffer[:count])
        self._device.finish()
        return self.read_clock() - start

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank."""
        start = self.read_clock()
        rows = torch.zeros(self._group.size(), len(values), dtype=torch.float64, device="cpu")
        rows[self._group.rank()] = torch.tensor(values, dtype=torch.float64, device="cpu")
        rows = rows.to(self._like.device)
        # A sum with one nonzero term is exact, and gloo supports all_reduce of GPU tensors.
        dist.all_reduce(rows, group=self._group)
        everyone = rows.tolist()
        self.agreement_s += self.read_clock() - start
        return everyone


class Budget:
    """Budget of measurements: seconds, and bytes of payload that each rank sends.

    The numbers are equal on all ranks at all times, so that all ranks stop at the same message.
    """

    def __init__(self, seconds: float, size_bytes: float, parent: Budget | None = None):
        self.seconds = self._whole_s = seconds
        self.size_bytes = self._whole_bytes = size_bytes
        self._parent = parent

    def share(self, part: float) -> Budget:
        """Return a budget of this share of the whole, but at most the rest.

        Payments from the share are also payments from this budget.
        """
        return Budget(
            max(0.0, min(self.seconds, part * self._whole_s)),
            max(0.0, min(self.size_bytes, part * self._whole_bytes)),
            self,
        )

    def allow(self, seconds: float) -> None:
        """Raise the whole budget to `seconds`, if that is more."""
        more_s = max(0.0, seconds - self._whole_s)
        self.seconds += more_s
        self._whole_s += more_s

    def pay(self, seconds: float, size_bytes: float) -> None:
        """Subtract seconds and bytes that were spent."""
        self.seconds -= seconds
        self.size_bytes -= size_bytes
        if self._parent is not None:
            self._parent.pay(seconds, size_bytes)

    def times(self, seconds: float, size_bytes: float) -> int:
        """Return how many times the rest of the budget allows this cost."""
        return int(max(0.0, min(self.seconds / max(seconds, 1e-9), self.size_bytes / size_bytes)))


def measure_messages(
    probe: Probe, collective: Collective, sizes: Sequence[int], budget: Budget
) -> list[float]:
    """Return the seconds of one message of each size, as means over ranks.

    The budget pays the time of the slowest rank, and that of earlier agreements.
    """
    start, probe.agreement_s = probe.read_clock() - probe.agreement_s, 0.0
    seconds = [probe.send(collective, size) for size in sizes]
    everyone = probe.agree([*seconds, probe.read_clock() - start])
    *columns, spent_s = zip(*everyone, strict=True)
    budget.pay(max(spent_s), sum(sizes))
    return [fmean(column) for column in columns]
