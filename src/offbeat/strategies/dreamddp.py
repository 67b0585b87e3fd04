"""DreamDDP: partial synchronization with sets of layers chosen to hide under backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat import solve
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.local_sgd import EVERY_ITERATION
from offbeat.strategies.partial_sync import Average, layer_times, partial_plan

Solver = Callable[[list[float], list[float], int], solve.Sets]


@dataclass(frozen=True)
class DreamDDP(Strategy):
    """Layer-wise scheduled partial synchronization.

    `solver`: `best` (the better of `optimal` and `balanced`), `optimal` (contiguous sets),
    `balanced` (any sets), `dfs` (the paper's Algorithm 2), `brute-force`. `fill` adds output-side
    layers to iterations where they cost no time. `average` and `state` as in `PartialSync`.
    """

    period: int = 5
    solver: Literal["best", "optimal", "balanced", "dfs", "brute-force"] = "best"
    fill: bool = True
    average: Average = "after_update"
    state: StatePolicy = "local"

    name: ClassVar[str] = "dreamddp"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)

    def plan(self, profile: Profile, rank: int = 0) -> Plan:
        times = layer_times(profile, self.average, self.state)
        sets = _SOLVERS[self.solver](*times, self.period)
        fill = solve.fill_bubbles(sets, *times) if self.fill else ((),) * self.period
        return partial_plan(self.name, profile, sets, fill, self.average, self.state)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period)

    @property
    def state_policy(self) -> StatePolicy:
        return self.state


_SOLVERS: dict[str, Solver] = {
    "best": solve.best,
    "optimal": solve.optimal,
    "balanced": solve.balanced,
    "dfs": solve.dfs,
    "brute-force": solve.brute_force,
}
