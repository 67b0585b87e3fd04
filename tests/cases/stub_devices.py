"""Stand-ins for devices: `torch.cuda` without a GPU, a device whose marks are no numbers, and a
counter of launches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.core.transport import device as device_module
from offbeat.core.transport.device import CPU

LONG_S = 20.0


class StubStream:
    """A stream, whose device reaches events at once unless `stuck`."""

    def __init__(self, device: Any = None) -> None:
        self.device, self.waited = device, []
        self.reached = threading.Event()
        self.reached.set()

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        assert self.reached.wait(LONG_S)


class StubCUDA:
    """The part of `torch.cuda` that offbeat's `CUDA` uses, on a simulated clock.

    `now_s` is the time of the device. `elapsed_time` has the precision of the driver's.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.default = StubStream()
        self.current_of = dict[int, Any]()  # current device, by thread
        self._mine = threading.local()
        stub = self

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.timed, self.blocking = enable_timing, blocking

            def record(self, stream: StubStream) -> None:
                self.at_s, self.stream = stub.now_s, stream

            def query(self) -> bool:
                return self.stream.reached.is_set()

            def synchronize(self) -> None:
                self.stream.synchronize()

            def elapsed_time(self, end: Event) -> float:
                assert self.timed
                assert end.timed
                return float(np.float32(1e3 * (end.at_s - self.at_s)))

        self.Event, self.Stream = Event, StubStream

    def current_stream(self, device: Any = None) -> StubStream:
        return getattr(self._mine, "stream", self.default)

    @contextmanager
    def stream(self, stream: StubStream) -> Iterator[None]:
        before, self._mine.stream = self.current_stream(), stream
        yield
        self._mine.stream = before

    def synchronize(self, device: Any = None) -> None:
        pass

    def set_device(self, device: Any) -> None:
        self.current_of[threading.get_ident()] = device


def stub_cuda(monkeypatch: pytest.MonkeyPatch) -> StubCUDA:
    """Give offbeat's devices a stub, and return it. Its clock is the host's, too."""
    stub = StubCUDA()
    found = SimpleNamespace(cuda=stub, device=torch.device)
    monkeypatch.setattr(device_module, "torch", found)
    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: stub.now_s))
    return stub


class Opaque:
    """A mark, with which only its device can compute."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()


class OpaqueMarks(CPU):
    """The host, with marks as little as numbers as those of a GPU."""

    def mark(self) -> Opaque:
        return Opaque()

    def run(self, after: Any, work: Callable[..., None], *args: Any) -> tuple[Any, Any]:
        assert isinstance(after, Opaque)
        start = self.mark()
        work(*args)
        return start, self.mark()

    def seconds(self, mark: Opaque) -> float:
        return mark._at_s


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
