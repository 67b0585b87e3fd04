"""Devices of compute and communication: time marks, and order between their work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mark = Any
"""A point in a device's work: perf_counter seconds on a CPU, a `_Moment` on a GPU.

Only the methods of the device that has made a mark can use it.
"""


class Device:
    """Interface of the runtime to a device, with the behaviour of the host, on which work is
    complete when a call returns."""

    def mark(self) -> Mark:
        """Return a mark after all work that is enqueued for compute so far."""
        return time.perf_counter()

    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        """Run `work(*args)` after the mark `after`, on the calling thread of a link.

        Returns:
            Marks of start and end.
        """
        start = time.perf_counter()
        work(*args)
        return start, time.perf_counter()

    def follow(self, mark: Mark) -> None:
        """Let later compute run after `mark`. The host does not wait."""

    def seconds(self, mark: Mark) -> float:
        """Return the time of a mark in perf_counter seconds. Waits until it is reached."""
        return mark

    def has_reached(self, mark: Mark) -> bool:
        """Return whether a mark is reached. The host does not wait."""
        return True

    def await_mark(self, mark: Mark) -> None:
        """Block the calling thread until a mark is reached."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let the memory of tensors outlive their last reference until the device has completed the
        work that the calling thread has enqueued by then.

        Needed for tensors that another thread has allocated.
        """

    def free_bytes(self) -> int | None:
        """Return the memory that can be allocated on a GPU; None for the host."""
        return None

    def finish(self) -> None:
        """Wait until the device has completed all work."""


class CPU(Device):
    """The host."""

    mark = staticmethod(time.perf_counter)  # type: ignore[assignment] # without a frame of Python


ANCHOR_S = 60.0
"""Seconds after which marks get a new reference event. `Event.elapsed_time` is a float32 of
milliseconds, whose steps are .004 ms after a minute and 64 ms after 6 days."""
ANCHOR_TRIES = 3


class _Anchor(NamedTuple):
    """Reference event, and the `perf_counter` seconds at which the device has reached it."""

    event: torch.cuda.Event
    at_s: float


class _Moment(NamedTuple):
    """Mark on a GPU: an event, and the reference for its time."""

    event: torch.cuda.Event
    anchor: _Anchor


class CUDA(Device):
    """A GPU with one stream per link thread. Events order compute and communication.

    Event times are converted to the host's clock by a reference event, which is replaced every
    `ANCHOR_S` seconds because the clocks drift.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._of_thread = threading.local()
        torch.cuda.synchronize(device)
        # This stream has no work, so the device reaches a reference event as it is recorded.
        self._idle = torch.cuda.Stream(device)
        self._anchor = self._create_anchor()

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def run(self, after: Mark, work: Callable[..., None], *args: Any) -> tuple[Mark, Mark]:
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            # Each thread has its own current device. Device 0 would get a context of this process.
            torch.cuda.set_device(self._device)
            stream = self._of_thread.stream = torch.cuda.Stream(self._device)
        stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            start = self._record(stream)
            work(*args)
            return start, self._record(stream)

    def follow(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def seconds(self, mark: Mark) -> float:
        mark.event.synchronize()
        return mark.anchor.at_s + mark.anchor.event.elapsed_time(mark.event) / 1e3

    def has_reached(self, mark: Mark) -> bool:
        return mark.event.query()

    def await_mark(self, mark: Mark) -> None:
        mark.event.synchronize()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return free + reserved - torch.cuda.memory_allocated(self._device)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _record(self, stream: torch.cuda.Stream) -> _Moment:
        if time.perf_counter() - self._anchor.at_s > ANCHOR_S:
            self._anchor = self._create_anchor()
        anchor = self._anchor  # the device has reached it before the new event
        return _Moment(_record_event(stream), anchor)

    def _create_anchor(self) -> _Anchor:
        """Return a reference event at the present time: the one of several tries for which the
        host has waited the shortest time."""
        tries = []
        for _ in range(ANCHOR_TRIES):
            begin_s = time.perf_counter()
            event = _record_event(self._idle)
            event.synchronize()
            end_s = time.perf_counter()
            tries.append((end_s - begin_s, _Anchor(event, end_s)))
        return min(tries, key=lambda one: one[0])[1]


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Without `blocking`, a thread that waits for the event occupies a processor.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
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
