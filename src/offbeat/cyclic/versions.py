"""Parameter versions of stages: version of each micro-batch, and versions still in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.cyclic.timetable import Timetable

Table = Sequence[Sequence[bool]]  # [micro-batches, stages], stages from the output on


class Contents(NamedTuple):
    """Contents of a stage in transfer.

    `versions` are in ascending order. `summing`: a sum of gradients exists. `stateful`: the
    optimizer has state.
    """

    versions: list[int]
    summing: bool
    stateful: bool


@dataclass
class Versions:
    """Parameter versions by micro-batch and stage. Version t are the parameters before iteration t.

    Micro-batches of iteration t use version t where their entry in `rules[t % len(rules)]` is true,
    otherwise version t - 1. `series` are the iterations since the start or the last `finish`; all
    micro-batches of the first one use the same version. The first `skipped` iterations do not
    update parameters. `stateful`: stages of which the optimizer had state at the start.
    """

    table: Timetable
    rules: Sequence[Table]
    skipped: int
    stateful: Sequence[int] = ()
    series: range = range(0)

    def version_of(self, batch: int, stage: int) -> int:
        """Return the version that a micro-batch uses in a stage."""
        t, i = divmod(batch, self.table.n)
        fresh = self.rules[t % len(self.rules)][i][self.table.n - 1 - stage]
        return t if fresh or t == self.series.start else t - 1

    def versions_used_on(self, device: int, stage: int, since: int) -> set[int]:
        """Return the versions that forwards of a stage on a device use from a time step on."""
        table = self.table

        def is_pending(batch: int) -> bool:
            return table.forward_at(batch, stage) >= since and table.device(batch, stage) == device

        return self._used_versions(stage, since, is_pending)

    def contents(self, stage: int, due: int) -> Contents:
        """Return the contents of a stage in a transfer that is due in time step `due`."""
        table = self.table
        ended = [t for t in self.series if table.backward_at(self.last(t), stage) < due]
        newest = max(ended, default=self.series.start - 1) + 1
        used = self._used_versions(stage, due, lambda batch: table.backward_at(batch, stage) >= due)
        summing = any(
            table.backward_at(table.n * t, stage) < due <= table.backward_at(self.last(t), stage)
            for t in self.series
        )
        versions = sorted({number for number in used if number < newest} | {newest})
        return Contents(versions, summing, stage in self.stateful or newest > self.skipped)

    def last(self, iteration: int) -> int:
        """Return the last micro-batch of an iteration."""
        return self.table.n * (iteration + 1) - 1

    def _used_versions(self, stage: int, since: int, is_pending: Callable[[int], bool]) -> set[int]:
        now = since // self.table.period
        # The previous iteration may still be under way, and the next one may have begun.
        near = range(max(now - 2, self.series.start), min(now + 2, self.series.stop + 1))
        batches = range(self.table.n * near.start, self.table.n * near.stop)
        return {self.version_of(batch, stage) for batch in batches if is_pending(batch)}
