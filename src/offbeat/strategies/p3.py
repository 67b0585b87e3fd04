"""P3: small slices of gradients, the input side's first, one in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.strategies.slices import Prioritized, Update, by_priority, forward_plan


@dataclass(frozen=True)
class P3(Prioritized):
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
