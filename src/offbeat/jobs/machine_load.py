"""Load of this machine during a launch or a measurement, and of processes outside of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

EVERY_S = 0.5  # seconds between samples
COST = 0.01  # largest share of a processor's time for taking samples
# bounds of an undisturbed sample: largest foreign share, smallest idle share
FOREIGN, IDLE = 0.1, 0.25
OFTEN = 0.1  # share of samples in which other programs may take processors

_PROC = Path("/proc")


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

    This process, the process `root` and all its descendants count as own. Interrupts are not
    counted, because most of them are packets of the launch.
    """

    def __init__(self, root: int) -> None:
        self._root = root
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
        """Add a sample. Without /proc, or with another format of it, there is none."""
        with suppress(OSError, ValueError, IndexError):
            self._tally.add(self._sample())

    def load(self) -> Load | None:
        """Return the load so far; None if /proc does not provide it."""
        seconds, now_s = time.monotonic() - self._begin_s, _cpu_pressure_s()
        if self._waited_s is None or now_s is None:
            return self._tally.load()
        return self._tally.load((now_s - self._waited_s) / seconds)

    def _run(self) -> None:
        with suppress(OSError, ValueError, IndexError):  # /proc is missing or has another format
            rest_s = 0.0
            while not self._stopped.wait(rest_s):
                begin_s = time.thread_time()
                self._tally.add(self._sample())
                rest_s = max(EVERY_S, (time.thread_time() - begin_s) / COST)
            self._tally.add(self._sample())

    def _sample(self) -> LoadSample:
        own_s = _descendants_s({self._root, os.getpid()})
        return LoadSample(time.monotonic(), *_processors_s(self._processors), own_s)


def _processors_s(numbers: Iterable[int]) -> tuple[float, float]:
    """Return the (busy, idle) seconds of some processors since the machine started."""
    names, busy, idle = {f"cpu{n}" for n in numbers}, 0, 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, idle_ticks, iowait, _, _, steal = map(int, fields[:8])
            busy += user + nice + system + steal
            idle += idle_ticks + iowait
    return busy / _HZ, idle / _HZ


def _descendants_s(roots: set[int]) -> float:
    """Return the processor seconds of processes and their descendants.

    The time of an ended process is included in that of the parent that has waited for it.
    """
    parents, ticks = {}, {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    own, queue = set[int](), [*roots]
    while queue:
        process = queue.pop()
        if process not in own:
            own.add(process)
            queue += children.get(process, ())
    return sum(ticks.get(process, 0) for process in own) / _HZ


def _cpu_pressure_s() -> float | None:
    """Return the seconds in which at least one process has waited for a processor; None without
    PSI."""
    try:
        some = (_PROC / "pressure" / "cpu").read_text().split("\n", 1)[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None


_HZ = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # Windows has no sysconf
