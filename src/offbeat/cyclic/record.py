"""Recorded works, memory and messages of an `Interleaved` trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from offbeat.cyclic.kept_activations import Activations
from offbeat.cyclic.timetable import Message, Timetable, Work
from offbeat.cyclic.trainer import Interleaved


class Done(NamedTuple):
    """A work with its start and end."""

    work: Work
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class TimetableRun:
    """Works of a timetable in time, simulated or measured."""

    table: Timetable
    works: Sequence[Done]

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


@dataclass
class Record:
    """Works, memory and messages of one process.

    Times are seconds of the host's monotonic clock. `peak_held_bytes` counts parameters, gradients
    and optimizer state after each work.
    """

    works: list[Done] = field(default_factory=list)
    sent: list[tuple[Message, float, int]] = field(default_factory=list)  # (message, s, bytes)
    peak_activation_bytes: int = 0
    peak_held_bytes: int = 0


@contextmanager
def recording(trainer: Interleaved) -> Iterator[Record]:
    """Record the works of a trainer while the context is entered."""
    record = Record()

    def parameters() -> Iterable[Tensor]:
        return (flat for s in trainer.stages for one in s.all_versions() for flat in one.flats)

    with Activations(parameters) as meter:

        def on_work(work: Work, begin_s: float, end_s: float) -> None:
            record.works.append(Done(work, begin_s, end_s))
            held_bytes = sum(stage.nbytes for stage in trainer.stages)
            record.peak_held_bytes = max(record.peak_held_bytes, held_bytes)

        def on_sent(message: Message, size_bytes: int) -> None:
            record.sent.append((message, time.perf_counter(), size_bytes))

        trainer.on_work, trainer.on_sent = on_work, on_sent
        try:
            yield record
        finally:
            trainer.on_work = trainer.on_sent = None
            record.peak_activation_bytes = meter.peak_bytes


def merge_records(table: Timetable, records: Iterable[Record]) -> TimetableRun:
    """Merge the works of all processes of one host into one run that begins at 0 s."""
    records = [*records]
    origin = min(done.begin_s for record in records for done in record.works)
    works = [
        Done(done.work, done.begin_s - origin, done.end_s - origin)
        for record in records
        for done in record.works
    ]
    return TimetableRun(table, sorted(works, key=lambda done: done.begin_s))
