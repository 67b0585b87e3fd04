"""Costs of timetables in unit time, simulated runs and their activations.

In unit time every forward and backward of a stage takes one time step, and messages take none
(Cyclic Data Parallelism, Fig. 1 and 2, Table 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.cyclic.record import Done, TimetableRun
from offbeat.cyclic.timetable import Message, Timetable, Work

ITERATIONS = 5  # simulated iterations
MIDDLE = 2  # iteration for which costs are reported, with others before and after it


class Collective(NamedTuple):
    """Collective of the devices of some stages after the works of time step `sent`.

    Kinds: `all_reduce` of gradients, `broadcast` of stages, `reduce` of gradients to the home.
    """

    sent: int
    kind: Literal["all_reduce", "broadcast", "reduce"]
    stages: range
    devices: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Consecutive messages of a ring; a tree would need at least log2 K, with more bytes."""
        return (2 if self.kind == "all_reduce" else 1) * (len(self.devices) - 1)

    @property
    def volume(self) -> float:
        """Bytes that each device sends in a ring, as a multiple of the collective's size."""
        count = len(self.devices)
        return 2 * (count - 1) / count if self.kind == "all_reduce" else 1.0


class ParallelTimetable(Timetable):
    """Timetable whose N micro-batches of an iteration begin in the same time step.

    Gradients and stages move in collectives, so only neighbouring stages exchange messages.
    """

    def copies(self, stage: int) -> int:
        return 1 if self.placement == "single" else self.n

    def first_step(self, batch: int) -> int:
        return self.period * (batch // self.n)

    def works(self, time: int) -> list[Work]:
        iteration = time // self.period
        batches = range(self.n * iteration, self.n * (iteration + 1))
        return [self._work(time, batch) for batch in batches]

    def due_messages(self, time: int, iterations: range) -> Iterator[Message]:
        for work in self.works(time):
            if work.batch // self.n in iterations and (message := self.input_message(work)):
                yield message

    def collectives(self, iteration: int) -> Iterator[Collective]:
        """Yield the collectives of an iteration.

        `workers` has one all-reduce at the end, `pyramid` one per stage after its backward. `zero`
        broadcasts each stage before forward and backward, and reduces its gradients.
        """
        begin, end = self.period * iteration, self.period * (iteration + 1) - 1
        if self.placement == "single" or self.n == 1:
            return
        batches = range(self.n * iteration, self.n * (iteration + 1))
        for stage in range(self.n):
            done = end - stage
            one = range(stage, stage + 1)
            members = tuple(sorted({self.device(batch, stage) for batch in batches}))
            if self.placement == "zero":
                for time in (begin + stage, done):
                    yield Collective(time - 1, "broadcast", one, members)
                yield Collective(done, "reduce", one, members)
            elif self.placement == "pyramid":
                yield Collective(done, "all_reduce", one, members)
        if self.placement == "workers":
            yield Collective(end, "all_reduce", range(self.n), tuple(range(self.n)))


@dataclass(frozen=True)
class StageFacts:
    """Seconds and kept bytes of each stage for one micro-batch, from the input on."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    activation_bytes: Sequence[float]

    @staticmethod
    def unit(n: int, backward: float = 1.0) -> StageFacts:
        """`n` equal stages: a forward takes 1, a backward `backward`, and all stages keep 1."""
        return StageFacts([1.0] * n, [backward] * n, [1 / n] * n)


def simulate(table: Timetable, facts: StageFacts, iterations: int = ITERATIONS) -> TimetableRun:
    """Simulate a timetable with measured stages and messages that take no time.

    A work begins when its device is free, the micro-batch's previous work has ended, and the
    senders of its messages have computed what precedes them.
    """
    series = range(iterations)
    steps = range(table.period * (iterations + 1))
    messages: dict[int, list[Message]] = defaultdict(list)  # by time step of the send
    for time in steps:
        for message in table.due_messages(time, series):
            if message.batch // table.n in series:
                messages[max(message.sent, 0)].append(message)
    free: dict[int, float] = defaultdict(float)  # end of each device's last work
    came: dict[tuple[int, int, int], float] = defaultdict(float)  # by due step, batch and stage
    ends: dict[tuple[int, int, bool], float] = {}
    works = []
    for time in steps:
        for work in table.works(time):
            if work.batch // table.n in series:
                before = ends.get(_predecessor(table, work), 0.0)
                begin = max(free[work.device], came[time, work.batch, work.stage], before)
                took = facts.backward_s if work.backward else facts.forward_s
                end = begin + took[work.stage]
                free[work.device] = ends[work.batch, work.stage, work.backward] = end
                works.append(Done(work, begin, end))
        for message in messages[time]:
            key = message.due, message.batch, message.stage
            came[key] = max(came[key], free[message.source])
    return TimetableRun(table, works)


def _predecessor(table: Timetable, work: Work) -> tuple[int, int, bool]:
    """Return the (micro-batch, stage, backward) that must precede a work.

    This is the micro-batch's previous work. For its first work in the cyclic order it is the second
    work of the previous micro-batch, which keeps the distance of two time steps.
    """
    last = table.n - 1
    if work.backward:
        return (work.batch, min(work.stage + 1, last), work.stage < last)
    if work.stage:
        return (work.batch, work.stage - 1, False)
    if isinstance(table, ParallelTimetable):
        return (-1, 0, False)
    return (work.batch - 1, 1, False) if last else (work.batch - 1, 0, True)


def unit_time_run(table: Timetable, iterations: int = ITERATIONS) -> TimetableRun:
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
    return TimetableRun(table, works)


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
    if isinstance(table, ParallelTimetable):
        for one in table.collectives(MIDDLE):
            volume[one.sent] += one.volume * len(one.devices) * len(one.stages) / table.n
            for device in one.devices:
                count[one.sent, device] += one.rounds
    return volume, handed, count


def _messages_sent_in(table: Timetable, steps: range) -> Iterator[Message]:
    """Yield the messages that are sent after these time steps."""
    for time in range(steps.start, steps.stop + table.period):
        messages = table.due_messages(time, range(ITERATIONS))
        yield from (message for message in messages if message.sent in steps)


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


def activation_curves(run: TimetableRun, facts: StageFacts) -> dict[int, list[tuple[float, float]]]:
    """Return by device the (time, bytes) of activations at each change.

    The activations of a stage exist from the begin of its forward to the end of its backward.
    """
    changes: dict[int, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for done in run.works:
        size, device = facts.activation_bytes[done.work.stage], done.work.device
        if done.work.backward:
            changes[device][done.end_s] -= size
        else:
            changes[device][done.begin_s] += size
    return {device: _cumulative_curve(changes[device]) for device in sorted(changes)}


def total_activation_curve(run: TimetableRun, facts: StageFacts) -> list[tuple[float, float]]:
    """Return the (time, bytes) of the activations of all devices together at each change."""
    changes: defaultdict[float, float] = defaultdict(float)
    for curve in activation_curves(run, facts).values():
        for (at, now), (_, before) in zip(curve, [(0.0, 0.0), *curve], strict=False):
            changes[at] += now - before
    return _cumulative_curve(changes)


def _cumulative_curve(changes: Mapping[float, float]) -> list[tuple[float, float]]:
    level, curve = 0.0, []
    for at in sorted(changes):
        level += changes[at]
        curve.append((at, level))
    return curve
