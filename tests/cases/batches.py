"""Calls that share a world, which costs as much as several trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from harness.ranks import WorldError, run_ranks


@dataclass(frozen=True)
class Attempt:
    """What a call returned on one rank, or the kind and the text of its exception."""

    result: Any = None
    kind: str = ""
    error: str = ""


class Batch:
    """Calls added while a file is imported. All run in turn in one world when the first outcome is
    asked for; if the world fails, each has its own.

    Exceptions must come on all ranks of a call, so that models can be closed.
    """

    def __init__(self, world_size: int, timeout_s: float = 240.0):
        self.world_size, self.timeout_s = world_size, timeout_s
        self._calls: list[tuple[Any, ...]] = []
        self._ranks: list[list[Attempt]] | None = None

    def add(self, function: Callable[..., Any], *args: Any) -> Call:
        """Add a call with picklable arguments."""
        self._calls.append((function, *args))
        return Call(self, len(self._calls) - 1)

    def given(self, function: Callable[..., Any], *args: Any) -> pytest.MarkDecorator:
        """Add a call, which the decorated test gets as `call`."""
        return _argument("call", self.add(function, *args))

    def each(self, function: Callable[..., Any], *calls: Sequence[Any]) -> pytest.MarkDecorator:
        """Add a call for each sequence of arguments; the decorated test gets them as `calls`."""
        return _argument("calls", [self.add(function, *args) for args in calls])

    def outcomes(self, i: int) -> list[Attempt]:
        """Return the outcomes of the i-th call by rank."""
        if self._ranks is None:
            try:
                self._ranks = self._run(self._calls)
            except WorldError:
                self._ranks = []
        ranks = self._ranks or self._run(self._calls[i : i + 1])
        return [rank[i if self._ranks else 0] for rank in ranks]

    def _run(self, calls: Sequence[tuple[Any, ...]]) -> list[list[Attempt]]:
        from cases.workers import attempts  # imports torch

        found = run_ranks(self.world_size, attempts, calls, timeout_s=self.timeout_s)
        return [[Attempt(*one) for one in rank] for rank in found]


def _argument(name: str, value: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, [value], ids=[pytest.HIDDEN_PARAM])


@dataclass(frozen=True)
class Call:
    """One call of a batch."""

    batch: Batch
    number: int

    @property
    def outcomes(self) -> list[Attempt]:
        """Outcomes by rank, failures included."""
        return self.batch.outcomes(self.number)

    @property
    def results(self) -> list[Any]:
        """Results by rank; a failure of a rank fails the test."""
        for rank, found in enumerate(self.outcomes):
            assert not found.kind, f"rank {rank}: {found.kind}: {found.error}"
        return [found.result for found in self.outcomes]
