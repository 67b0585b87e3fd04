"""Placements: cyclic and parallel timetables in time, from what stages take and hold.

In unit time every stage takes one step each way and messages take none (Cyclic Data Parallelism,
Fig. 1 and 2, Table 1). With measured stages a work begins when its device is free and what it needs
has come. A device sends one message at a time, and receives one at a time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.cyclic.timetable import Collective, Message, Timetable, Work

ITERATIONS = 5  # of which one in the middle has both neighbours
MIDDLE = 2


@dataclass(frozen=True)
class StageFacts:
    """What stages take and hold, from the input on: seconds and bytes, of one micro-batch.

    `handed_bytes`: what each stage hands to the next one. `parameter_bytes` with all that belongs
    to them (what travels with `zero`); gradients are as large as `gradient_bytes`.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    activation_bytes: Sequence[float]
    handed_bytes: Sequence[float]
    gradient_bytes: Sequence[float]
    parameter_bytes: Sequence[float]

    def __post_init__(self) -> None:
        counts = {
            "backward_s": self.backward_s,
            "activation_bytes": self.activation_bytes,
            "handed_bytes": self.handed_bytes,
            "gradient_bytes": self.gradient_bytes,
            "parameter_bytes": self.parameter_bytes,
        }
        for name, values in counts.items():
            if len(values) != len(self.forward_s):
                raise ValueError(
                    f"{name} ({len(values)}) must have a value for each of the "
                    f"{len(self.forward_s)} stages, as forward_s has"
                )

    @staticmethod
    def unit(n: int, backward: float = 1.0) -> StageFacts:
        """Even stages: a time step forward; activations, parameters and gradients of the whole
        model are 1, and so is what all stages hand over."""
        share, handed = [1 / n] * n, [1 / max(n - 1, 1)] * n
        return StageFacts([1.0] * n, [backward] * n, share, handed, share, share)

    def seconds(self, work: Work) -> float:
        """Of a work on a device of speed 1."""
        return (self.backward_s if work.backward else self.forward_s)[work.stage]

    def bytes_of(self, message: Message) -> float:
        """Of a message."""
        if message.what in ("activation", "gradient"):
            # Both cross the edge behind the earlier stage.
            return self.handed_bytes[message.stage - (message.what == "activation")]
        sizes = self.parameter_bytes if message.what == "states" else self.gradient_bytes
        return sizes[message.stage]


class Done(NamedTuple):
    """A work and when it was done."""

    work: Work
    begin_s: float
    end_s: float


class Moved(NamedTuple):
    """A message, or one device's part of a collective, and when its bytes were on the link."""

    what: str
    source: int
    target: int
    begin_s: float
    end_s: float
    bytes: float


@dataclass(frozen=True)
class Run:
    """A timetable in time, simulated or measured."""

    table: Timetable
    works: Sequence[Done]
    moved: Sequence[Moved]

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration, from the begin of the second one to that of the last one."""
        begins: dict[int, float] = {}
        for done in self.works:
            t = done.work.batch // self.table.n
            begins[t] = min(begins.get(t, math.inf), done.begin_s)
        first, last = min(1, max(begins)), max(begins)
        if first == last:
            raise ValueError(f"a run of {last + 1} iterations must have at least 3")
        return (begins[last] - begins[first]) / (last - first)

    def held(self, facts: StageFacts) -> dict[int, list[tuple[float, float]]]:
        """By device: when activations change, and their bytes from then on. A stage's are there
        from the begin of its forward to the end of its backward."""
        changes: dict[int, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for done in self.works:
            size, device = facts.activation_bytes[done.work.stage], done.work.device
            if done.work.backward:
                changes[device][done.end_s] -= size
            else:
                changes[device][done.begin_s] += size
        return {device: _summed(changes[device]) for device in sorted(changes)}

    def total(self, facts: StageFacts) -> list[tuple[float, float]]:
        """The same of all devices together."""
        changes: defaultdict[float, float] = defaultdict(float)
        for curve in self.held(facts).values():
            for (at, now), (_, before) in zip(curve, [(0.0, 0.0), *curve], strict=False):
                changes[at] += now - before
        return _summed(changes)

    def load(self, step_s: float) -> dict[tuple[int, int], list[float]]:
        """By link (source, target): bytes in each `step_s` of one iteration in the middle."""
        begin = min(d.begin_s for d in self.works if d.work.batch // self.table.n == MIDDLE)
        steps = max(round(self.iteration_s / step_s), 1)
        found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0] * steps)
        for one in self.moved:
            seconds = max(one.end_s - one.begin_s, 1e-12)
            for k in range(steps):
                since, until = begin + k * step_s, begin + (k + 1) * step_s
                shared = min(one.end_s, until) - max(one.begin_s, since)
                found[one.source, one.target][k] += one.bytes * max(shared, 0.0) / seconds
        return dict(found)


def in_steps(table: Timetable, iterations: int = ITERATIONS) -> Run:
    """A timetable as the paper draws it: every work takes one time step, and in each step all
    micro-batches pass one stage, on one device, too. Messages are between two steps."""
    times = range(table.period * (iterations + 1))
    works = [
        Done(work, float(time), time + 1.0)
        for time in times
        for work in table.works(time)
        if work.batch // table.n in range(iterations)
    ]
    return Run(table, works, [])


def simulate(
    table: Timetable,
    facts: StageFacts,
    iterations: int = ITERATIONS,
    bytes_per_s: float = math.inf,
    latency_s: float = 0.0,
    speeds: Mapping[int, float] | None = None,
) -> Run:
    """A timetable in time. `speeds` of devices that are slower or faster than 1."""
    return _Simulation(table, facts, iterations, bytes_per_s, latency_s, speeds or {}).run()


@dataclass
class _Simulation:
    table: Timetable
    facts: StageFacts
    iterations: int
    bytes_per_s: float
    latency_s: float
    speeds: Mapping[int, float]

    def run(self) -> Run:
        series = range(self.iterations)
        # A work begins no earlier than what it needs has come, and its device is free.
        self.came: dict[Work, float] = defaultdict(float)
        self.free: dict[int, float] = defaultdict(float)
        self.sends: dict[int, float] = defaultdict(float)
        self.receives: dict[int, float] = defaultdict(float)
        self.works: list[Done] = []
        self.moved: list[Moved] = []
        self.ends: dict[tuple[int, int, bool], float] = {}
        after = self._after(series)
        together = defaultdict(list)
        for t in series:
            for one in self.table.collectives(t) if not self.table.cyclic else ():
                together[one.sent].append(one)
        for one in together[-1]:
            self._together(one)
        for time in range(self.table.period * (self.iterations + 1)):
            for work in self.table.works(time):
                if work.batch // self.table.n in series:
                    self._work(work)
            for message in after[time]:
                self._message(message)
            for one in together[time]:
                self._together(one)
        return Run(self.table, self.works, self.moved)

    def _after(self, series: range) -> dict[int, list[Message]]:
        """Messages by the step after which they are sent."""
        found: dict[int, list[Message]] = defaultdict(list)
        for time in range(self.table.period * (self.iterations + 1)):
            for message in _due(self.table, time, series):
                if message.batch // self.table.n in series:
                    found[max(message.sent, 0)].append(message)
        return found

    def _work(self, work: Work) -> None:
        begin = max(self.free[work.device], self.came[work], self._led(work))
        end = begin + self.facts.seconds(work) / self.speeds.get(work.device, 1.0)
        self.free[work.device] = self.ends[work.batch, work.stage, work.backward] = end
        self.works.append(Done(work, begin, end))

    def _led(self, work: Work) -> float:
        """The end of what the micro-batch passed before; and, of its first work, of what keeps it
        two steps behind the one before."""
        table, last = self.table, self.table.n - 1
        if work.backward:
            near = (work.batch, work.stage, False) if work.stage == last else None
            near = near or (work.batch, work.stage + 1, True)
        elif work.stage:
            near = (work.batch, work.stage - 1, False)
        elif table.cyclic:
            near = (work.batch - 1, 1, False) if last else (work.batch - 1, 0, True)
        else:
            return 0.0
        return self.ends.get(near, 0.0)

    def _message(self, message: Message) -> None:
        begin = max(self.free[message.source], self.sends[message.source])
        begin = max(begin, self.receives[message.target])
        size = self.facts.bytes_of(message)
        gone = begin + size / self.bytes_per_s
        self.sends[message.source] = self.receives[message.target] = gone
        self.moved.append(Moved(message.what, message.source, message.target, begin, gone, size))
        for work in self.table.works(message.due):
            if (work.batch, work.stage) == (message.batch, message.stage):
                self.came[work] = max(self.came[work], gone + self.latency_s)

    def _together(self, one: Collective) -> None:
        """All members begin together, and none computes meanwhile."""
        begin = max(self.free[device] for device in one.devices)
        size = sum(self.facts.gradient_bytes[stage] for stage in one.stages)
        end = begin + rounds(one) * self.latency_s + sent(one) * size / self.bytes_per_s
        for source, target in zip(one.devices, [*one.devices[1:], one.devices[0]], strict=True):
            self.free[source] = end
            self.moved.append(Moved(one.kind, source, target, begin, end, sent(one) * size))


def rounds(one: Collective) -> int:
    """Messages that follow each other in a collective, as a ring: 2(K-1) of an all-reduce, K-1 of
    the others. A tree needs at least log2 K, and sends more at a time."""
    return (2 if one.kind == "all_reduce" else 1) * (len(one.devices) - 1)


def sent(one: Collective) -> float:
    """What a device sends in a ring, as a multiple of the collective's size."""
    count = len(one.devices)
    return 2 * (count - 1) / count if one.kind == "all_reduce" else 1.0


@dataclass(frozen=True)
class Costs:
    """What an order takes, in unit time, in the middle of training (the paper's Table 1).

    `activations` of one device at most, in sets of one micro-batch; `parameters` of one device at
    most, in models; `volume` and `handed`: what all devices send between two time steps at most,
    in models and in what all stages hand over; `messages` that follow each other between two time
    steps at most, on a device.
    """

    devices: int
    activations: float
    parameters: float
    volume: float
    handed: float
    messages: int


def costs(table: Timetable) -> Costs:
    """What an order takes."""
    steps = range(MIDDLE * table.period, (MIDDLE + 1) * table.period)
    volume, handed, count = _traffic(table, steps)
    return Costs(
        table.devices,
        _activations(table, steps) / table.n,
        _parameters(table, steps),
        max(volume.values(), default=0.0),
        max(handed.values(), default=0.0),
        max(count.values(), default=0),
    )


def _activations(table: Timetable, steps: range) -> int:
    """Of stages, on one device in one time step: all works of a step are under way together."""
    held: Counter[tuple[int, int]] = Counter()
    for batch in range(table.n * ITERATIONS):
        for stage in range(table.n):
            device = table.device(batch, stage)
            for time in range(table.forward_at(batch, stage), table.backward_at(batch, stage) + 1):
                held[device, time] += 1
    return max(count for (_, time), count in held.items() if time in steps)


def _traffic(
    table: Timetable, steps: range
) -> tuple[dict[int, float], dict[int, float], Counter[tuple[int, int]]]:
    """After each time step: models sent, what is handed over, and by device how many messages."""
    volume: dict[int, float] = defaultdict(float)
    handed: dict[int, float] = defaultdict(float)
    count: Counter[tuple[int, int]] = Counter()
    for message in _sent(table, steps):
        if message.what in ("activation", "gradient"):
            handed[message.sent] += 1 / (table.n - 1)
        else:
            volume[message.sent] += 1 / table.n
        count[message.sent, message.source] += 1
    if not table.cyclic:
        for one in table.collectives(MIDDLE):
            volume[one.sent] += sent(one) * len(one.devices) * len(one.stages) / table.n
            for device in one.devices:
                count[one.sent, device] += rounds(one)
    return volume, handed, count


def _sent(table: Timetable, steps: range) -> Iterator[Message]:
    """Messages after these time steps."""
    for time in range(steps.start, steps.stop + table.period):
        messages = _due(table, time, range(ITERATIONS))
        yield from (message for message in messages if message.sent in steps)


def _due(table: Timetable, time: int, iterations: range) -> Iterable[Message]:
    """Between two devices, in either order; collectives of the parallel one are apart."""
    if table.cyclic:
        return table.due(time, iterations)
    return filter(None, map(table.handed, table.works(time)))


def _parameters(table: Timetable, steps: range) -> float:
    """Of the model, on one device: the stages that are its own, or those that it computes with in
    two steps that follow each other."""
    if table.placement != "zero":
        return max(len(table.stages_of(device)) for device in range(table.devices)) / table.n
    used: dict[tuple[int, int], set[int]] = defaultdict(set)
    for time in steps:
        for work in table.works(time):
            used[work.device, time].add(work.stage)
            used[work.device, time - 1].add(work.stage)  # on its way
    return max(map(len, used.values())) / table.n


def _summed(changes: Mapping[float, float]) -> list[tuple[float, float]]:
    level, curve = 0.0, []
    for at in sorted(changes):
        level += changes[at]
        curve.append((at, level))
    return curve
