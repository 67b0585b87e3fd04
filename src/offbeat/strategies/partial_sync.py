"""PartialSync: one set of layers averaged per iteration of a period, under backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import periodic_bound_s
from offbeat.strategies.averaging import Layerwise
from offbeat.strategies.equations import Equations, StatePolicy
from offbeat.strategies.pieces import layer_sets, partial, partial_plan, whole_buckets


@dataclass(frozen=True)
class PartialSync(Layerwise):
    """Average ceil(L / period) of the L layers per iteration, in order (PLSGD-ENP).

    `average="before_update"` averages the parameters in backward and applies the local update in
    `optimizer.step()`, which allows gradient clipping and GradScaler.
    """

    state: StatePolicy = field(default="local", kw_only=True)
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`,
    more bytes), or clear it (`reset`)."""

    name: ClassVar[str] = "partial-sync"
    unadvised: ClassVar[str] = "dreamddp with its period is as fast or faster"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Section 3.1, Example 1"

    def averages(self, profile: Profile) -> Plan:
        layers = tuple(range(len(profile.buckets)))
        size = -(-len(layers) // self.period)
        sets = tuple(layers[h * size : (h + 1) * size] for h in range(self.period))
        pieces = whole_buckets(len(layers))
        return partial_plan(self.name, profile, pieces, sets, self.when, self.state)

    def equations(self, plan: Plan) -> Equations:
        return partial(layer_sets(plan), self.when, self.state, outer=self.outer_equations)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=False)
