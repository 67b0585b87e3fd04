"""Where compute and communication run: marks in time, and who waits for whom."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A point in a device's work: perf_counter seconds on CPU, a CUDA event on a GPU."""


class Device(ABC):
    """The five things that the runtime asks of a device."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark after everything that compute has been given so far."""

    @abstractmethod
    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        """Called on a link's thread: do `work` after `after`; marks of its start and end."""

    @abstractmethod
    def follow(self, mark: Mark) -> None:
        """Compute given from now on runs after `mark` (the host may go on)."""

    @abstractmethod
    def seconds(self, mark: Mark) -> float:
        """When a mark was reached, perf_counter seconds; waits for the device."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the device has nothing left to do."""


class CPU(Device):
    """The host itself: work is done when the call returns."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        start = time.perf_counter()
        work(*args)
        return start, time.perf_counter()

    def follow(self, mark: Mark) -> None:
        pass

    def seconds(self, mark: Mark) -> float:
        return mark

    def finish(self) -> None:
        pass


class CUDA(Device):
    """One stream per link thread; events order compute and communication.

    Event times are mapped to the host's clock by one reference event.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        torch.cuda.synchronize(device)
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        key = threading.get_ident()
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self._device)
        stream = self._streams[key]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            start = self._record(stream)
            work(*args)
            return start, self._record(stream)

    def follow(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def seconds(self, mark: Mark) -> float:
        mark.synchronize()
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def device_of(device: torch.device) -> Device:
    """The interface for a torch device; ValueError for one that is not supported."""
    if device.type == "cpu":
        return CPU()
    if device.type == "cuda":
        return CUDA(device)
    raise ValueError(
        f"device ({device}) must be a CPU or a CUDA device; move the model before prepare"
    )
