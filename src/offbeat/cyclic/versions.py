"""Versions: which parameters of a stage a micro-batch uses, and how long they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.cyclic.timetable import Timetable

Table = Sequence[Sequence[bool]]  # by micro-batch; stages from the output


class Contents(NamedTuple):
    """What there is of a stage that travels: versions, the oldest first; whether there is a sum of
    gradients; whether the optimizer has state."""

    versions: list[int]
    summing: bool
    stateful: bool


@dataclass
class Versions:
    """Version t of a stage is what iteration t begins with; `rules` repeat by iteration and say
    which micro-batch uses it where, instead of the one before.

    `series` are the iterations since the start or the last time that all had ended. Before them
    all versions were the same. The first `skipped` iterations do not update.
    """

    table: Timetable
    rules: Sequence[Table]
    skipped: int
    series: range = range(0)

    def number(self, batch: int, stage: int) -> int:
        """The version that a micro-batch uses."""
        t, i = divmod(batch, self.table.n)
        fresh = self.rules[t % len(self.rules)][i][self.table.n - 1 - stage]
        return t if fresh or t == self.series.start else t - 1

    def used_on(self, device: int, stage: int, since: int) -> set[int]:
        """By the forwards of a stage on a device, from a time step on."""
        table = self.table

        def waits(batch: int) -> bool:
            return table.forward_at(batch, stage) >= since and table.device(batch, stage) == device

        return self._used(stage, since, waits)

    def contents(self, stage: int, due: int, began_with_state: bool) -> Contents:
        """What there is of a stage that travels, when it is due somewhere."""
        table = self.table
        ended = [t for t in self.series if table.backward_at(self.last(t), stage) < due]
        newest = max(ended, default=self.series.start - 1) + 1
        used = self._used(stage, due, lambda batch: table.backward_at(batch, stage) >= due)
        summing = any(
            table.backward_at(table.n * t, stage) < due <= table.backward_at(self.last(t), stage)
            for t in self.series
        )
        versions = sorted({number for number in used if number < newest} | {newest})
        return Contents(versions, summing, began_with_state or newest > self.skipped)

    def last(self, iteration: int) -> int:
        """The last micro-batch of an iteration."""
        return self.table.n * (iteration + 1) - 1

    def _used(self, stage: int, since: int, waits: Callable[[int], bool]) -> set[int]:
        now = since // self.table.period
        # The iteration before may still be under way, and one more may follow.
        near = range(max(now - 2, self.series.start), min(now + 2, self.series.stop + 1))
        batches = range(self.table.n * near.start, self.table.n * near.stop)
        return {self.number(batch, stage) for batch in batches if waits(batch)}
