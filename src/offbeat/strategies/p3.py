"""P3: small slices of gradients in forward order, one in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, require_count
from offbeat.strategies.slices import Prioritized, Update, forward_plan, priority_slices

MOST_SUGGESTED_SLICES = 2000  # of the whole model; more slices cost latency and planning time


@dataclass(frozen=True)
class P3(Prioritized):
    """Send small slices of gradients, one at a time, in the order of the next forward.

    The next forward of a bucket waits only for the slices of this bucket. The optimizer updates the
    bucket immediately before that forward.
    """

    slice_elements: int = 40_000
    """Largest number of 4-byte elements in a slice."""
    update: Update = "on_arrival"
    """Time of the updates: before the next forward of each bucket (`on_arrival`), or in
    `optimizer.step()` (`at_step`), for scripts that clip or read gradients before the step."""

    name: ClassVar[str] = "p3"
    citation: ClassVar[str] = (
        "Jayarajan et al., Priority-based Parameter Propagation for Distributed DNN Training, "
        "MLSys 2019"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("slice_elements", self.slice_elements)

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        elements = sum(bucket.size_bytes for bucket in profile.buckets) // ELEMENT_BYTES
        return (cls(slice_elements=max(cls.slice_elements, elements // MOST_SUGGESTED_SLICES)),)

    def schedule(self, profile: Profile) -> Plan:
        order = priority_slices(profile.slowest(), self.slice_elements, credit_bytes=1)
        return forward_plan(self.name, profile, order, update=self.update)
