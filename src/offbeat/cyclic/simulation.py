"""Simulation of cyclic and parallel timetables with measured stages.

A work begins when its device is free and its inputs have arrived. A device sends one message at a
time and receives one at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from offbeat.cyclic.timetable import Collective, Message, Timetable, Work

ITERATIONS = 5  # simulated iterations


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
        for one in fields(self):
            if len(getattr(self, one.name)) != len(self.forward_s):
                raise ValueError(
                    f"{one.name} ({len(getattr(self, one.name))}) must have a value for each of "
                    f"the {len(self.forward_s)} stages, as forward_s has"
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
    """A work with its start and end."""

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
        """Seconds per iteration, from the start of the second iteration to that of the last."""
        begins: dict[int, float] = {}
        for done in self.works:
            t = done.work.batch // self.table.n
            begins[t] = min(begins.get(t, math.inf), done.begin_s)
        first, last = min(1, max(begins)), max(begins)
        if first == last:
            raise ValueError(f"a run of {last + 1} iterations must have at least 3")
        return (begins[last] - begins[first]) / (last - first)


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
        # Arrival of a work's inputs; start of the idle time of each device and of its link.
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
            for message in due_messages(self.table, time, series):
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


def due_messages(table: Timetable, time: int, iterations: range) -> Iterable[Message]:
    """Return the messages between two devices that are due in a time step, in either order.

    The collectives of the parallel order are not among them.
    """
    if table.cyclic:
        return table.due_messages(time, iterations)
    return filter(None, map(table.input_message, table.works(time)))
