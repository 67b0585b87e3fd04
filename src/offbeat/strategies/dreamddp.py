"""DreamDDP: partial synchronization with sets of layers chosen to hide under backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat import solve
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.local_sgd import EVERY_ITERATION
from offbeat.strategies.partial_sync import Average, Piece, layer_times, partial_plan

Solver = Callable[[list[float], list[float], int], solve.Sets]


@dataclass(frozen=True)
class DreamDDP(Strategy):
    """Layer-wise scheduled partial synchronization.

    `solver`: `best` (the better of `optimal` and `balanced`), `optimal` (contiguous sets),
    `balanced` (any sets), `dfs` (the paper's Algorithm 2), `brute-force`. `fill` adds output-side
    layers to iterations where they cost no time. `split` (ours) cuts buckets - the first and the
    last ready, or all - into one slice per iteration where that is predicted to be faster: every
    iteration then has something to send early and little to send late. `average` and `state` as
    in `PartialSync`.
    """

    period: int = 5
    solver: Literal["best", "optimal", "balanced", "dfs", "brute-force"] = "best"
    fill: bool = True
    split: bool = False
    average: Average = "after_update"
    state: StatePolicy = "local"

    name: ClassVar[str] = "dreamddp"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        if self.split and self.state == "reset":
            raise ValueError(
                "split (True) must be left out with state 'reset': a slice has no optimizer state "
                "of its own to reset; use state='local' or 'averaged'"
            )

    def schedule(self, profile: Profile) -> Plan:
        solver = _SOLVERS[self.solver]
        backward_s, communication_s = layer_times(profile, self.average, self.state)
        latency_s = profile.default_link.latency_s * (2 if self.state == "averaged" else 1)
        chosen = None
        for cuts in self._cuts(len(backward_s)):
            pieces, times = cut(cuts, self.period, backward_s, communication_s, latency_s)
            sets = solver(*times, self.period)
            seconds = solve.period_cost(sets, *times)
            if chosen is None or seconds < chosen[0]:
                chosen = seconds, sets, pieces, times
        assert chosen is not None
        _, sets, pieces, times = chosen
        fill = solve.fill_bubbles(sets, *times) if self.fill else ((),) * self.period
        return partial_plan(self.name, profile, sets, fill, self.average, self.state, pieces)

    def _cuts(self, size: int) -> list[frozenset[int]]:
        """Sets of buckets to try in slices: none; some of the first and of the last; all."""
        if not self.split:
            return [frozenset()]
        ends = range(min(self.period, size) + 1)
        some = [frozenset((*range(a), *range(size - z, size))) for a in ends for z in ends]
        return list(dict.fromkeys([*some, frozenset(range(size))]))

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=False)


def cut(
    cuts: Container[int],
    parts: int,
    backward_s: Sequence[float],
    communication_s: Sequence[float],
    latency_s: float,
) -> tuple[list[Piece], tuple[list[float], list[float]]]:
    """The buckets in `cuts` in `parts` slices, the others whole: pieces, and their backward and
    communication seconds. A bucket's slices are ready together; each pays the latency."""
    pieces: list[Piece] = []
    ready_s: list[float] = []
    sending_s: list[float] = []
    for bucket, (b, c) in enumerate(zip(backward_s, communication_s, strict=True)):
        n = parts if bucket in cuts else 1
        fixed = min(latency_s, c)
        pieces += [Piece(bucket, part, n) for part in range(n)]
        ready_s += [b] + [0.0] * (n - 1)
        sending_s += [fixed + (c - fixed) / n] * n
    return pieces, (ready_s, sending_s)


_SOLVERS: dict[str, Solver] = {
    "best": solve.best,
    "optimal": solve.optimal,
    "balanced": solve.balanced,
    "dfs": solve.dfs,
    "brute-force": solve.brute_force,
}
