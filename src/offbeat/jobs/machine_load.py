"""Load of this machine during a launch or a measurement, and of processes outside of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

EVERY_S = 0.5  # seconds between samples
COST = 0.01  # largest share of a processor's time for taking samples
# bounds of an undisturbed sample: largest foreign share, smallest idle share
FOREIGN, IDLE = 0.1, 0.25
OFTEN = 0.1  # share of samples in which other programs may take processors


class LoadSample(NamedTuple):
    """Cumulative times in seconds.

    Attributes:
        at_s: time of the clock.
        busy_s: processor time in user or kernel mode, or taken by other virtual machines.
        idle_s: processor time in idle state.
        own_s: processor time of the launch's own processes.
    """

    at_s: float
    busy_s: float
    idle_s: float
    own_s: float


@dataclass(frozen=True)
class Load:
    """Load of the processors during one launch.

    Attributes:
        seconds: duration.
        foreign: share of the processor time used by processes outside the launch.
        idle: share of the processor time in idle state.
        disturbed: share of the samples with more than `FOREIGN` foreign and less than `IDLE` idle
            time.
        pressure: share of the time in which a process waited for a processor (PSI); None if
            unknown.
    """

    seconds: float
    foreign: float
    idle: float
    disturbed: float
    pressure: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the load as JSON-ready data."""
        return asdict(self)


def disturbing_share(load: Mapping[str, Any] | None) -> float | None:
    """Return the share of the processors that other programs used, of the record of a load; None if
    they disturbed no measurement, or without a record."""
    load = load or {}
    return load["foreign"] if load.get("disturbed", 0.0) > OFTEN else None


def describe_foreign(share: float) -> str:
    """Return a phrase for the share of the processors that other programs used."""
    return f"other programs used {100 * share:.0f} % of the processors"


class LoadTally:
    """Sum of samples in constant memory."""

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._first: LoadSample | None = None
        self._last: LoadSample | None = None
        self._count = self._disturbed = 0

    def add(self, sample: LoadSample) -> None:
        """Add the next sample."""
        if self._last is not None and sample.at_s > self._last.at_s:
            foreign, idle = _shares(self._last, sample, self._processors)
            self._count += 1
            self._disturbed += foreign > FOREIGN and idle < IDLE
        self._first, self._last = self._first or sample, sample

    def load(self, pressure: float | None = None) -> Load | None:
        """Return the load between the first and the last sample; None with fewer than two."""
        if self._first is None or self._last is None or not self._count:
            return None
        seconds = self._last.at_s - self._first.at_s
        foreign, idle = _shares(self._first, self._last, self._processors)
        return Load(seconds, foreign, idle, self._disturbed / self._count, pressure)


def _shares(a: LoadSample, b: LoadSample, processors: int) -> tuple[float, float]:
    """Return the (foreign, idle) shares of the processor time between two samples."""
    whole_s = (b.at_s - a.at_s) * processors
    foreign_s = (b.busy_s - a.busy_s) - (b.own_s - a.own_s)
    return max(0.0, foreign_s / whole_s), min(1.0, max(0.0, (b.idle_s - a.idle_s) / whole_s))


class LoadSampler:
    """Sampler of the machine's load, at calls of `sample`, or by a thread in a `with` block.

    Interrupts are not counted, because most of them are packets of the launch.

    Args:
        root: process that counts as own, with all its descendants; None: this process.
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = root or os.getpid()
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
        self._processors = sorted(os.sched_getaffinity(0)) if has_affinity else []
        self._tally = LoadTally(len(self._processors))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-load", daemon=True)
        self._begin_s, self._waited_s = time.monotonic(), _cpu_pressure_s()

    def __enter__(self) -> Self:
        self._begin_s, self._waited_s = time.monotonic(), _cpu_pressure_s()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def sample(self) -> None:
        """Add a sample, if the system provides the times."""
        if self._processors:
            with suppress(OSError, psutil.Error, IndexError):
                self._tally.add(self._sample())

    def load(self) -> Load | None:
        """Return the load so far; None if the system does not provide it."""
        seconds, now_s = time.monotonic() - self._begin_s, _cpu_pressure_s()
        if self._waited_s is None or now_s is None:
            return self._tally.load()
        return self._tally.load((now_s - self._waited_s) / seconds)

    def _run(self) -> None:
        rest_s = 0.0
        while not self._stopped.wait(rest_s):
            begin_s = time.thread_time()
            self.sample()
            rest_s = max(EVERY_S, (time.thread_time() - begin_s) / COST)
        self.sample()

    def _sample(self) -> LoadSample:
        times = psutil.cpu_times(percpu=True)
        own = [times[number] for number in self._processors]
        busy_s = sum(t.user + t.nice + t.system + t.steal for t in own)
        idle_s = sum(t.idle + t.iowait for t in own)
        return LoadSample(time.monotonic(), busy_s, idle_s, _with_descendants_s(self._root))


def _with_descendants_s(root: int) -> float:
    """Return the processor seconds of a process and its descendants.

    The time of an ended process is included in that of the parent that has waited for it.
    """
    first, seconds = psutil.Process(root), 0.0
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended
            seconds += sum(process.cpu_times()[:4])  # user and system, also of ended children
    return seconds


def _cpu_pressure_s() -> float | None:
    """Return the seconds in which at least one process has waited for a processor; None without
    PSI."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split("\n", 1)[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None
