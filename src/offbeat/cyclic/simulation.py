"""Simulation of cyclic and parallel timetables, and their costs in unit time.

In unit time every forward and backward of a stage takes one time step, and messages take none
(Cyclic Data Parallelism, Fig. 1 and 2, Table 1). With measured stages a work begins when its device
is free and its inputs have arrived. A device sends one message at a time and receives one at a
time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.cyclic.timetable import Collective, Message, Timetable, Work

ITERATIONS = 5  # simulated iterations
MIDDLE = 2  # iteration for which costs are reported, with others before and after it


@dataclass(frozen=True)
class StageFacts:
    """Seconds and bytes of each stage for one micro-batch, from the input on.

    `handed_bytes` is the size of a stage's output. `parameter_bytes` includes all that moves with
    the parameters in the placement `zero`, such as optimizer state.
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
        """Return `n` equal stages in unit time.

        A forward takes 1 and a backward `backward`. The bytes of activations, parameters, gradients
        and outputs add up to 1 each over all stages.
        """
        share, handed = [1 / n] * n, [1 / max(n - 1, 1)] * n
        return StageFacts([1.0] * n, [backward] * n, share, handed, share, share)

    def seconds(self, work: Work) -> float:
        """Return the seconds of a work on a device of speed 1."""
        return (self.backward_s if work.backward else self.forward_s)[work.stage]

    def bytes_of(self, message: Message) -> float:
        """Return the bytes of a message."""
        if message.what in ("activation", "gradient"):
            # Both have the size of the earlier stage's output.
            return self.handed_bytes[message.stage - (message.what == "activation")]
        sizes = self.parameter_bytes if message.what == "states" else self.gradient_bytes
        return sizes[message.stage]


class Done(NamedTuple):
    """A work with its begin and end."""

    work: Work
    begin_s: float
    end_s: float


class Moved(NamedTuple):
    """A message, or one device's part of a collective, with begin and end of its transfer."""

    what: str
    source: int
    target: int
    begin_s: float
    end_s: float
    bytes: float


@dataclass(frozen=True)
class Run:
    """Works and transfers of a timetable in time, simulated or measured."""

    table: Timetable
    works: Sequence[Done]
    moved: Sequence[Moved]

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration, from the begin of the second iteration to that of the last one."""
        begins: dict[int, float] = {}
        for done in self.works:
            t = done.work.batch // self.table.n
            begins[t] = min(begins.get(t, math.inf), done.begin_s)
        first, last = min(1, max(begins)), max(begins)
        if first == last:
            raise ValueError(f"a run of {last + 1} iterations must have at least 3")
        return (begins[last] - begins[first]) / (last - first)

    def activation_curves(self, facts: StageFacts) -> dict[int, list[tuple[float, float]]]:
        """Return by device the (time, bytes) of activations at each change.

        The activations of a stage exist from the begin of its forward to the end of its backward.
        """
        changes: dict[int, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for done in self.works:
            size, device = facts.activation_bytes[done.work.stage], done.work.device
            if done.work.backward:
                changes[device][done.end_s] -= size
            else:
                changes[device][done.begin_s] += size
        return {device: _cumulative_curve(changes[device]) for device in sorted(changes)}

    def total_activation_curve(self, facts: StageFacts) -> list[tuple[float, float]]:
        """Return the (time, bytes) of the activations of all devices together at each change."""
        changes: defaultdict[float, float] = defaultdict(float)
        for curve in self.activation_curves(facts).values():
            for (at, now), (_, before) in zip(curve, [(0.0, 0.0), *curve], strict=False):
                changes[at] += now - before
        return _cumulative_curve(changes)

    def link_bytes(self, step_s: float) -> dict[tuple[int, int], list[float]]:
        """Return by link (source, target) the bytes in each `step_s` of the middle iteration."""
        begin = min(d.begin_s for d in self.works if d.work.batch // self.table.n == MIDDLE)
        steps = max(round(self.iteration_s / step_s), 1)
        bytes_by_link: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0] * steps)
        for transfer in self.moved:
            seconds = max(transfer.end_s - transfer.begin_s, 1e-12)
            for k in range(steps):
                since, until = begin + k * step_s, begin + (k + 1) * step_s
                shared = min(transfer.end_s, until) - max(transfer.begin_s, since)
                bytes_by_link[transfer.source, transfer.target][k] += (
                    transfer.bytes * max(shared, 0.0) / seconds
                )
        return dict(bytes_by_link)


def unit_time_run(table: Timetable, iterations: int = ITERATIONS) -> Run:
    """Return a timetable in unit time, as in the paper's figures.

    Every work takes one time step, and in each step all micro-batches pass one stage, even with one
    device. Messages take no time.
    """
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
    """Simulate a timetable with measured stages.

    Args:
        table: the timetable.
        facts: seconds and bytes of the stages.
        iterations: number of iterations.
        bytes_per_s: rate of each link.
        latency_s: seconds from the end of a transfer to its arrival.
        speeds: relative compute speed by device, 1 by default.
    """
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
        # Arrival of a work's inputs; begin of the idle time of each device and of its link.
        self.came: dict[Work, float] = defaultdict(float)
        self.free: dict[int, float] = defaultdict(float)
        self.sends: dict[int, float] = defaultdict(float)
        self.receives: dict[int, float] = defaultdict(float)
        self.works: list[Done] = []
        self.moved: list[Moved] = []
        self.ends: dict[tuple[int, int, bool], float] = {}
        messages = self._messages_by_send_step(series)
        together = defaultdict(list)
        for t in series:
            for one in self.table.collectives(t) if not self.table.cyclic else ():
                together[one.sent].append(one)
        for one in together[-1]:
            self._run_collective(one)
        for time in range(self.table.period * (self.iterations + 1)):
            for work in self.table.works(time):
                if work.batch // self.table.n in series:
                    self._run_work(work)
            for message in messages[time]:
                self._send_message(message)
            for one in together[time]:
                self._run_collective(one)
        return Run(self.table, self.works, self.moved)

    def _messages_by_send_step(self, series: range) -> dict[int, list[Message]]:
        """Return the messages by the time step after which they are sent."""
        found: dict[int, list[Message]] = defaultdict(list)
        for time in range(self.table.period * (self.iterations + 1)):
            for message in _due_messages(self.table, time, series):
                if message.batch // self.table.n in series:
                    found[max(message.sent, 0)].append(message)
        return found

    def _run_work(self, work: Work) -> None:
        begin = max(self.free[work.device], self.came[work], self._predecessor_end_s(work))
        end = begin + self.facts.seconds(work) / self.speeds.get(work.device, 1.0)
        self.free[work.device] = self.ends[work.batch, work.stage, work.backward] = end
        self.works.append(Done(work, begin, end))

    def _predecessor_end_s(self, work: Work) -> float:
        """Return the end of the work that must precede this one.

        This is the micro-batch's previous work. For its first work in the cyclic order it is the
        second work of the previous micro-batch, which keeps the distance of two time steps.
        """
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

    def _send_message(self, message: Message) -> None:
        begin = max(self.free[message.source], self.sends[message.source])
        begin = max(begin, self.receives[message.target])
        size = self.facts.bytes_of(message)
        gone = begin + size / self.bytes_per_s
        self.sends[message.source] = self.receives[message.target] = gone
        self.moved.append(Moved(message.what, message.source, message.target, begin, gone, size))
        for work in self.table.works(message.due):
            if (work.batch, work.stage) == (message.batch, message.stage):
                self.came[work] = max(self.came[work], gone + self.latency_s)

    def _run_collective(self, one: Collective) -> None:
        """Simulate a collective. Its devices begin together and do not compute meanwhile."""
        begin = max(self.free[device] for device in one.devices)
        size = sum(self.facts.gradient_bytes[stage] for stage in one.stages)
        end = begin + rounds(one) * self.latency_s + ring_volume(one) * size / self.bytes_per_s
        for source, target in zip(one.devices, [*one.devices[1:], one.devices[0]], strict=True):
            self.free[source] = end
            self.moved.append(Moved(one.kind, source, target, begin, end, ring_volume(one) * size))


def rounds(one: Collective) -> int:
    """Return the number of consecutive messages of a collective of K devices as a ring.

    An all-reduce has 2(K-1), the other kinds K-1. A tree would need at least log2 K, with more
    bytes at a time.
    """
    return (2 if one.kind == "all_reduce" else 1) * (len(one.devices) - 1)


def ring_volume(one: Collective) -> float:
    """Return the bytes that each device sends in a ring, as a multiple of the collective's size."""
    count = len(one.devices)
    return 2 * (count - 1) / count if one.kind == "all_reduce" else 1.0


@dataclass(frozen=True)
class Costs:
    """Largest costs of a timetable in unit time, within the middle iteration (Table 1).

    Attributes:
        devices: number of devices.
        activations: activations of one device, in sets of one micro-batch.
        parameters: parameters of one device, in models.
        volume: gradients and stages that all devices send between two time steps, in models.
        handed: outputs and their gradients that all devices send between two time steps, in sets of
            one micro-batch.
        messages: consecutive messages of one device between two time steps.

    Source: Cyclic Data Parallelism, Table 1.
    """

    devices: int
    activations: float
    parameters: float
    volume: float
    handed: float
    messages: int


def costs(table: Timetable) -> Costs:
    """Return the costs of a timetable."""
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
    """Return the largest number of stages with activations on one device in one time step.

    All works of a time step count as simultaneous.
    """
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
    """Return `volume` and `handed` of `Costs` by time step, and messages by (step, device)."""
    volume: dict[int, float] = defaultdict(float)
    handed: dict[int, float] = defaultdict(float)
    count: Counter[tuple[int, int]] = Counter()
    for message in _messages_sent_in(table, steps):
        if message.what in ("activation", "gradient"):
            handed[message.sent] += 1 / (table.n - 1)
        else:
            volume[message.sent] += 1 / table.n
        count[message.sent, message.source] += 1
    if not table.cyclic:
        for one in table.collectives(MIDDLE):
            volume[one.sent] += ring_volume(one) * len(one.devices) * len(one.stages) / table.n
            for device in one.devices:
                count[one.sent, device] += rounds(one)
    return volume, handed, count


def _messages_sent_in(table: Timetable, steps: range) -> Iterator[Message]:
    """Yield the messages that are sent after these time steps."""
    for time in range(steps.start, steps.stop + table.period):
        messages = _due_messages(table, time, range(ITERATIONS))
        yield from (message for message in messages if message.sent in steps)


def _due_messages(table: Timetable, time: int, iterations: range) -> Iterable[Message]:
    """Return the messages between two devices that are due in a time step, in either order.

    The collectives of the parallel order are not among them.
    """
    if table.cyclic:
        return table.due_messages(time, iterations)
    return filter(None, map(table.input_message, table.works(time)))


def _parameters(table: Timetable, steps: range) -> float:
    """Return the largest share of the model's parameters on one device.

    With `zero` a device has the stages of two consecutive time steps, otherwise its own ones.
    """
    if table.placement != "zero":
        return max(len(table.stages_of(device)) for device in range(table.devices)) / table.n
    used: dict[tuple[int, int], set[int]] = defaultdict(set)
    for time in steps:
        for work in table.works(time):
            used[work.device, time].add(work.stage)
            used[work.device, time - 1].add(work.stage)  # arrives during the previous step
    return max(map(len, used.values())) / table.n


def _cumulative_curve(changes: Mapping[float, float]) -> list[tuple[float, float]]:
    level, curve = 0.0, []
    for at in sorted(changes):
        level += changes[at]
        curve.append((at, level))
    return curve
