"""ByteScheduler: slices of gradients in forward order, in flight up to a credit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.plan import Fact, Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.strategies.slices import (
    Prioritized,
    Update,
    fastest,
    forward_plan,
    priority_slices,
    sizes_to_try,
)

TUNED = "use None to have it tuned"


@dataclass(frozen=True)
class ByteScheduler(Prioritized):
    """Send slices of gradients in the order of the next forward, in flight up to a credit.

    While the elements in flight are below the credit, the ready slice nearest the input side is
    sent. The next forward of a bucket waits only for the slices of this bucket, and the optimizer
    updates the bucket immediately before that forward. Small buckets are not fused.
    """

    partition_elements: int | None = None
    """Largest number of 4-byte elements in a slice; None: tuned by simulation. The paper uses
    4,000,000."""
    credit_elements: int | None = None
    """Largest number of elements in flight; 1: one slice at a time; None: tuned by simulation. The
    paper uses 16,000,000."""
    update: Update = "on_arrival"
    """Time of the updates: before the next forward of each bucket (`on_arrival`), or in
    `optimizer.step()` (`at_step`), for scripts that clip or read gradients before the step."""

    name: ClassVar[str] = "bytescheduler"
    citation: ClassVar[str] = (
        "Peng et al., A Generic Communication Scheduler for Distributed DNN Training "
        "Acceleration, SOSP 2019"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("partition_elements", "credit_elements"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), remedy=TUNED)

    def schedule(self, profile: Profile) -> Plan:
        slowest = profile.slowest()
        tried = self._settings_to_try(slowest)
        orders = [priority_slices(slowest, size, ELEMENT_BYTES * credit) for size, credit in tried]
        best = fastest(orders, slowest)
        size, credit = tried[best]
        facts = (
            Fact("partition_elements", size, "most elements of a slice"),
            Fact("credit_elements", credit, "elements in flight at once"),
        )
        return forward_plan(self.name, profile, orders[best], facts, self.update)

    def _settings_to_try(self, profile: Profile) -> list[tuple[int, int]]:
        """Return pairs of slice size and credit, in elements, that tuning compares."""
        partition, credit = self.partition_elements, self.credit_elements
        return [
            (size, in_flight)
            for size in (sizes_to_try(profile) if partition is None else [partition])
            for in_flight in ((1, size, 4 * size) if credit is None else [credit])
        ]
