"""Recording what a process computes, holds and sends while micro-batches are interleaved."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offbeat.core.measuring.activations import Activations
from offbeat.cyclic.simulation import Done, Moved, Run
from offbeat.cyclic.timetable import Message, Timetable, Work
from offbeat.cyclic.trainer import Interleaved


@dataclass
class Record:
    """Works of one process with their seconds (of the host's monotonic clock), bytes of
    activations and of parameters, gradients and optimizer state after each, and what was sent."""

    works: list[Done] = field(default_factory=list)
    activation_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    sent: list[tuple[Message, float, int]] = field(default_factory=list)  # seconds, bytes
    peak_activation_bytes: int = 0
    peak_held_bytes: int = 0


@contextmanager
def recording(trainer: Interleaved) -> Iterator[Record]:
    """What a trainer does while it is entered."""
    record = Record()

    with Activations(trainer.held) as meter:

        def worked(work: Work, begin_s: float, end_s: float) -> None:
            record.works.append(Done(work, begin_s, end_s))
            record.activation_bytes.append(meter.live_bytes)
            record.held_bytes.append(trainer.held_bytes())
            record.peak_held_bytes = max(record.peak_held_bytes, record.held_bytes[-1])

        def sent(message: Message, size_bytes: int) -> None:
            record.sent.append((message, time.perf_counter(), size_bytes))

        trainer.on_work, trainer.on_sent = worked, sent
        try:
            yield record
        finally:
            trainer.on_work = trainer.on_sent = None
            record.peak_activation_bytes = meter.peak_bytes


def together(table: Timetable, records: Iterable[Record]) -> Run:
    """The records of all processes of a host as one run, from second 0 on. What was sent has no
    length: when it has come is not recorded."""
    records = [*records]
    origin = min(done.begin_s for record in records for done in record.works)
    works = [
        Done(done.work, done.begin_s - origin, done.end_s - origin)
        for record in records
        for done in record.works
    ]
    moved = [
        Moved(m.what, m.source, m.target, at_s - origin, at_s - origin, size)
        for record in records
        for m, at_s, size in record.sent
    ]
    return Run(table, sorted(works, key=lambda done: done.begin_s), moved)
