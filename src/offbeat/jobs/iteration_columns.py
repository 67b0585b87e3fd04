"""Reader of the iterations that `iteration_log.py` has recorded; does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

MOST_LOSSES = 20_000  # largest number of losses kept of a record; longer records average neighbours


class IterationColumns:
    """The merged lines of one rank.

    Attributes:
        gap: iteration from which lines are missing, as after a long time without room; None if
            there is no gap. Later lines are left out.
        fields: newest value of each field that is no column.
        ends_s: seconds from the origin of the record to the end of each iteration.
        without_update: iterations that applied no gradient.
        votes: columns of `VoteLog`.
    """

    def __init__(self) -> None:
        self.gap: int | None = None
        self.fields: dict[str, Any] = {}
        self.votes: dict[str, Any] = {}
        self.ends_s: list[float] = []
        self.without_update: list[int] = []
        self._losses = _LossMeans()
        self._metrics: dict[str, list[tuple[int, float | None]]] = {}

    @property
    def losses_of(self) -> int:
        """Number of iterations that each loss averages; above 1 with more than `MOST_LOSSES`."""
        return self._losses.width

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of the kind "iterations"."""
        if self.gap is not None or line["first"] != len(self.ends_s):
            self.gap = len(self.ends_s) if self.gap is None else self.gap
            return
        self.ends_s += line.pop("ends_s")
        self.without_update += line.pop("without_update")
        for iteration, loss in line.pop("losses"):
            self._losses.add(iteration, math.nan if loss is None else loss)
        _extend_columns(self.votes, line.pop("votes"))
        _extend_columns(self._metrics, line.pop("metrics"))
        self.fields = line

    def losses(self) -> Iterator[tuple[int, float, float]]:
        """Yield (iteration, seconds, loss) of the iterations that have ended."""
        return self._timed(self._losses.means())

    def metrics(self) -> dict[str, tuple[tuple[int, float, float], ...]]:
        """Return (iteration, seconds, value) of each metric that the script has reported."""
        return {name: tuple(self._timed(values)) for name, values in self._metrics.items()}

    def _timed(self, values: Any) -> Iterator[tuple[int, float, float]]:
        ends_s = self.ends_s
        return ((i, ends_s[i], math.nan if x is None else float(x)) for i, x in values)


class _LossMeans:
    """Losses of iterations, averaged over groups of `width` consecutive iterations.

    `width` is a power of two, so that groups of different ranks have common boundaries.
    """

    def __init__(self) -> None:
        self.width = 1
        self._sums: dict[int, tuple[float, int, int]] = {}  # sum, count, last iteration

    def add(self, iteration: int, loss: float) -> None:
        self._add_mean(iteration, loss, 1)
        if len(self._sums) > MOST_LOSSES:
            self.width *= 2
            before, self._sums = self._sums, {}
            for total, count, last in before.values():
                self._add_mean(last, total, count)

    def _add_mean(self, iteration: int, loss: float, count: int) -> None:
        total, before, _ = self._sums.get(iteration // self.width, (0.0, 0, 0))
        self._sums[iteration // self.width] = total + loss, before + count, iteration

    def means(self) -> Iterator[tuple[int, float]]:
        for total, count, last in self._sums.values():
            yield last, total / count


def _extend_columns(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _extend_columns(into.setdefault(name, {}), value)
        else:
            into.setdefault(name, []).extend(value)
