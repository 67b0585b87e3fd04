"""Recorded works, memory and messages of an `Interleaved` trainer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offbeat.cyclic.kept_activations import Activations
from offbeat.cyclic.simulation import Done, Moved, Run
from offbeat.cyclic.timetable import Message, Timetable, Work
from offbeat.cyclic.trainer import Interleaved


@dataclass
class Record:
    """Works, memory and messages of one process.

    Times are seconds of the host's monotonic clock. `activation_bytes` and `held_bytes` have one
    value per work, taken after it. `held_bytes` counts parameters, gradients and optimizer state.
    """

    works: list[Done] = field(default_factory=list)
    activation_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    sent: list[tuple[Message, float, int]] = field(default_factory=list)  # (message, s, bytes)
    peak_activation_bytes: int = 0
    peak_held_bytes: int = 0


@contextmanager
def recording(trainer: Interleaved) -> Iterator[Record]:
    """Record the works of a trainer while the context is entered."""
    record = Record()

    with Activations(trainer.flat_versions) as meter:

        def on_work(work: Work, begin_s: float, end_s: float) -> None:
            record.works.append(Done(work, begin_s, end_s))
            record.activation_bytes.append(meter.live_bytes)
            record.held_bytes.append(trainer.memory_bytes())
            record.peak_held_bytes = max(record.peak_held_bytes, record.held_bytes[-1])

        def on_sent(message: Message, size_bytes: int) -> None:
            record.sent.append((message, time.perf_counter(), size_bytes))

        trainer.on_work, trainer.on_sent = on_work, on_sent
        try:
            yield record
        finally:
            trainer.on_work = trainer.on_sent = None
            record.peak_activation_bytes = meter.peak_bytes


def merge_records(table: Timetable, records: Iterable[Record]) -> Run:
    """Merge the records of all processes of one host into one run that begins at 0 s.

    Arrival times are not recorded, so messages have equal begin and end.
    """
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
