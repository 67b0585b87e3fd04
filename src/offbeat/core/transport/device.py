"""Devices of compute and communication: time marks, and order between their work."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A point in a device's work: perf_counter seconds on a CPU, a CUDA event on a GPU."""


class Device(ABC):
    """Interface of the runtime to a device."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark after all work that is enqueued for compute so far."""

    @abstractmethod
    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        """Run `work(*args)` after the mark `after`, on the calling thread of a link.

        Returns:
            Marks of start and end.
        """

    @abstractmethod
    def follow(self, mark: Mark) -> None:
        """Let later compute run after `mark`. The host does not wait."""

    @abstractmethod
    def seconds(self, mark: Mark) -> float:
        """Return the time of a mark in perf_counter seconds. Waits until it is reached."""

    @abstractmethod
    def has_reached(self, mark: Mark) -> bool:
        """Return whether a mark is reached. The host does not wait."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the device has completed all work."""


class CPU(Device):
    """The host, on which work is complete when a call returns."""

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

    def has_reached(self, mark: Mark) -> bool:
        return True

    def finish(self) -> None:
        pass


class CUDA(Device):
    """A GPU with one stream per link thread. Events order compute and communication.

    Event times are converted to the host's clock by one reference event.
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

    def has_reached(self, mark: Mark) -> bool:
        return mark.query()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def device_of(device: torch.device) -> Device:
    """Return the `Device` of a torch device. Raise ValueError unless it is CPU or CUDA."""
    if device.type == "cpu":
        return CPU()
    if device.type == "cuda":
        return CUDA(device)
    raise ValueError(
        f"device ({device}) must be a CPU or a CUDA device; move the model before prepare"
    )
