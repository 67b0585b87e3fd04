"""Set of iterations of a plan, stored as runs of consecutive integers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set
from itertools import chain, pairwise
from typing import Any


class Phases(Set[int]):
    """Immutable set of integers from 0 on. A set is equal to any set with the same members.

    Time and memory depend on the number of runs, not on the number of members.

    Args:
        members: integers of the set, in any order.

    Attributes:
        runs: (start, stop) of each run of consecutive members, ascending, with gaps between
            them.
    """

    __slots__ = ("runs",)
    runs: tuple[tuple[int, int], ...]

    def __init__(self, members: Iterable[int] = ()) -> None:
        if isinstance(members, Phases):
            self.runs = members.runs
        elif isinstance(members, range) and members.step == 1:
            self.runs = ((members.start, members.stop),) if members else ()
        else:
            self.runs = _merge_runs((member, member + 1) for member in sorted(members))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> Phases:
        """Return the union of runs.

        Args:
            runs: (start, stop) of each run, in any order.
        """
        phases = cls()
        phases.runs = _merge_runs(sorted(run for run in runs if run[0] < run[1]))
        return phases

    @classmethod
    def parse(cls, text: str) -> Phases:
        """Return the set that a text denotes.

        Args:
            text: result of `str`, such as "0,3-5" or "none".

        Raises:
            ValueError: the text is not such a list of runs.
        """
        runs = []
        for run in text.split(",") if text != "none" else ():
            first, _, last = run.partition("-")
            runs.append((int(first), int(last or first) + 1))
        return cls.of_runs(runs)

    def __contains__(self, phase: object) -> bool:
        if not isinstance(phase, int):
            return False
        return self._contains_run((phase, phase + 1))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(start, stop) for start, stop in self.runs)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __le__(self, other: Set[Any]) -> bool:
        if not isinstance(other, Phases):
            return Set.__le__(self, other)
        return all(other._contains_run(run) for run in self.runs)

    def _contains_run(self, run: tuple[int, int]) -> bool:
        at = bisect_right(self.runs, (run[0], float("inf"))) - 1
        return at >= 0 and run[1] <= self.runs[at][1]

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        if not isinstance(other, Phases):
            return super().isdisjoint(other)
        runs = sorted((*self.runs, *other.runs))
        return all(a[1] <= b[0] for a, b in pairwise(runs))

    def __hash__(self) -> int:
        return hash(self.runs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Phases):
            return self.runs == other.runs
        return Set.__eq__(self, other)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{a}-{z - 1}" if z - a > 1 else str(a) for a, z in self.runs) or "none"

    def __repr__(self) -> str:
        return f"Phases({self})"


def _merge_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ordered runs in which adjacent and overlapping runs are merged."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)
