"""P3: small slices of gradients, the input side's first, one in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import Strategy, require_count, synchronous_bound_s
from offbeat.strategies.slices import Update, by_priority, forward_plan
from offbeat.strategies.wired import Wired
from offbeat.testing.equations import Equations, synchronous


@dataclass(frozen=True)
class P3(Wired):
    """Small slices of gradients, one in flight, those first whose next forward comes first.

    The next forward of a bucket waits only for its own slices and comes right after its optimizer
    step.
    """

    slice_elements: int = 40_000
    """Most elements of 4 bytes in a slice."""
    update: Update = "on_arrival"
    """What the gradients' arrival does: the update at once (`on_arrival`), or nothing before
    `optimizer.step()` (`at_step`), for scripts that clip or read gradients before it."""

    name: ClassVar[str] = "p3"
    citation: ClassVar[str] = (
        "Jayarajan et al., Priority-based Parameter Propagation for Distributed DNN Training, "
        "MLSys 2019"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("slice_elements", self.slice_elements)

    def schedule(self, profile: Profile) -> Plan:
        order = by_priority(profile.slowest(), self.slice_elements, credit_bytes=1)
        return forward_plan(self.name, profile, order, update=self.update)

    def at_step(self) -> Strategy | None:
        return replace(self, update="at_step") if self.update == "on_arrival" else None

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile, fused=True)
