"""Costs of timetables in unit time, and activations of a run.

In unit time every forward and backward of a stage takes one time step, and messages take none
(Cyclic Data Parallelism, Fig. 1 and 2, Table 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbeat.cyclic.simulation import (
    ITERATIONS,
    Done,
    Run,
    StageFacts,
    due_messages,
    ring_volume,
    rounds,
)
from offbeat.cyclic.timetable import Message, Timetable

MIDDLE = 2  # iteration for which costs are reported, with others before and after it


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
        messages = due_messages(table, time, range(ITERATIONS))
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


def activation_curves(run: Run, facts: StageFacts) -> dict[int, list[tuple[float, float]]]:
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


def total_activation_curve(run: Run, facts: StageFacts) -> list[tuple[float, float]]:
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
