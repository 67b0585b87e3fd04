"""Tally: adds up the iterations of a rank into intervals."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.core.runtime.iteration import Iteration
from offbeat.core.transport.device import Device
from offbeat.jobs.interval import Interval, LinkSums, LossSums, bin_of
from offbeat.jobs.meter import exposed_communication_s

LOSSES_AT_ONCE = 256  # losses that are copied to the host in one call
ITERATIONS_AT_ONCE = 64  # iterations without messages that are added up together


class Tally:
    """Sums over the iterations of one rank since the last interval.

    The host never waits for an accelerator: an iteration counts once the device has reached its
    end, and a loss once its copy has arrived.

    Args:
        rank: rank of this process.
        device: device of the timestamps.
        sent_bytes: function that returns the bytes that this rank has sent so far, by link.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        rank: int,
        device: Device,
        sent_bytes: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.time,
    ):
        self._rank, self._device, self._clock = rank, device, clock
        self._sent_bytes, self._sent = sent_bytes, dict[str, int]()
        self._pending: deque[tuple[Iteration, int, bool]] = deque()
        self._losses = LossReader()
        self._reset()

    def _reset(self) -> None:
        self._first = self._n = self._updates = 0
        self._s_sum = self._wait_s = self._script_s = self._s_max = 0.0
        self._s_min = math.inf
        self._hist: dict[int, int] = {}
        self._links: dict[str, list[float]] = {}  # messages and seconds by link
        self._splits = [0, 0, 0.0, 0.0]  # iterations with a split, measured ones, and their sums

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of an iteration."""
        self._losses.add(loss)

    def add(self, done: Iteration, number: int, applied: bool) -> None:
        """Add a finished iteration.

        Args:
            done: the iteration.
            number: its number in the job, including those before a restart.
            applied: whether it applied an update.
        """
        if done.marks.end is None or done.marks.begin is None:
            return
        self._pending.append((done, number, applied))
        if done.messages or len(self._pending) >= ITERATIONS_AT_ONCE:
            self._count_reached()

    def _count_reached(self) -> None:
        while self._pending and self._pending[0][0].is_reached(self._device):
            self._count(*self._pending.popleft())

    def _count(self, done: Iteration, number: int, applied: bool) -> None:
        marks, at = done.marks, self._device.seconds
        begin_s = at(marks.begin)
        seconds = at(marks.end) - begin_s
        if not self._n:
            self._first = number
        self._n += 1
        self._updates += applied
        self._s_sum += seconds
        self._s_min, self._s_max = min(self._s_min, seconds), max(self._s_max, seconds)
        b = bin_of(seconds)
        self._hist[b] = self._hist.get(b, 0) + 1
        self._wait_s += exposed_communication_s(marks, self._device)
        if marks.first_forward is not None:
            forward_s = at(marks.first_forward)
            waits = ((at(one.begin), at(one.waited)) for one in marks.acted)
            waited_s = sum(end - start for start, end in waits if end <= forward_s)
            self._script_s += forward_s - begin_s - waited_s
        for message in done.messages:
            if message.end is not None and message.was_sent:
                sums = self._links.setdefault(message.transfer.link, [0, 0.0])
                sums[0] += 1
                sums[1] += at(message.end) - at(message.start)
        if done.split is not None:
            self._splits[0] += 1
            if done.split.measured:
                self._splits[1] += 1
                self._splits[2] += done.split.waited_s
                self._splits[3] += done.split.sent_s

    def close_interval(self) -> Interval | None:
        """Return the sums since the last call, and begin anew; None without an iteration."""
        self._count_reached()
        if not self._n:
            return None
        split, measured, waited_s, sent_s = self._splits
        links = {name: LinkSums(int(n), 0, s) for name, (n, s) in self._links.items()}
        for name, total in self._sent_bytes().items():
            sums = links.get(name, LinkSums())
            links[name] = sums._replace(bytes=total - self._sent.get(name, 0))
            self._sent[name] = total
        if measured:  # torch's DDP sends in some iterations that are measured, and in all others
            self._wait_s += waited_s * split / measured
            name = next(iter(links), "net")
            sums = links.get(name, LinkSums())
            links[name] = sums._replace(messages=split, seconds=sent_s * split / measured)
        wait_s = min(self._wait_s, self._s_sum - self._script_s)
        interval = Interval(
            rank=self._rank,
            first=self._first,
            n=self._n,
            t=self._clock(),
            s_sum=self._s_sum,
            s_min=self._s_min,
            s_max=self._s_max,
            hist=self._hist,
            own_s=self._s_sum - wait_s - self._script_s,
            wait_s=wait_s,
            script_s=self._script_s,
            links=links,
            loss=self._losses.close_interval(),
            updates=self._updates,
            rss_bytes=resident_bytes(),
            device_bytes=device_bytes(),
        )
        self._reset()
        return interval

    def end(self) -> None:
        """Count all iterations, and wait for the device if necessary."""
        while self._pending:
            self._count(*self._pending.popleft())
        self._losses.end()


class LossReader:
    """Copies losses to the host in groups, and adds them up once a copy has arrived."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._copies: deque[tuple[Tensor, Any]] = deque()  # with the event of their arrival
        self._reset()

    def _reset(self) -> None:
        self._n = self._nonfinite = 0
        self._sum = self._last = 0.0

    def add(self, loss: Tensor) -> None:
        """Add a loss: one element on any device."""
        if self._losses and self._losses[0].device != loss.device:
            self._copy()
        self._losses.append(loss)
        if len(self._losses) >= LOSSES_AT_ONCE:
            self._copy()

    def _copy(self) -> None:
        if not self._losses:
            return
        together = torch.stack([loss.reshape(()).float() for loss in self._losses])
        self._losses = []
        if together.device.type == "cuda":
            host = torch.empty(together.shape, pin_memory=True)
            host.copy_(together, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(together.device))
            self._copies.append((host, arrived))
        else:
            self._copies.append((together, None))
        self._count(wait=False)

    def _count(self, *, wait: bool) -> None:
        while self._copies:
            host, arrived = self._copies[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._copies.popleft()
            self._add_values(host.tolist())

    def _add_values(self, values: Sequence[float]) -> None:
        finite = [value for value in values if math.isfinite(value)]
        self._n += len(finite)
        self._nonfinite += len(values) - len(finite)
        self._sum += sum(finite)
        if finite:
            self._last = finite[-1]

    def close_interval(self) -> LossSums | None:
        """Return the sums over the losses that have arrived since the last call; None without
        any."""
        self._copy()
        if not self._n and not self._nonfinite:
            return None
        mean = self._sum / self._n if self._n else 0.0
        sums = LossSums(self._n, mean, self._last, self._nonfinite)
        self._reset()
        return sums

    def end(self) -> None:
        """Count all losses, and wait for their copies."""
        self._copy()
        self._count(wait=True)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None on systems without /proc."""
    try:
        with Path("/proc/self/statm").open("rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def device_bytes() -> int | None:
    """Return the memory that torch has allocated on this process's GPU; None without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
