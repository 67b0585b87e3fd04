"""BSP: one average of all gradients after backward, before the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.plan import Moment, Plan, Transfer, local, transfer
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import synchronous_bound_s
from offbeat.core.verify.equations import Equations, synchronous
from offbeat.strategies.compressible import Wired


@dataclass(frozen=True)
class BSP(Wired):
    """Bulk-synchronous SGD (S-SGD): one all-reduce of all gradients after backward."""

    name: ClassVar[str] = "bsp"
    citation: ClassVar[str] = "Valiant, A bridging model for parallel computation, CACM 1990"

    def schedule(self, profile: Profile) -> Plan:
        size = len(profile.buckets)
        messages = (all_gradients(profile, phases=[0]),)
        return Plan(self.name, size, messages, (local(size, Moment("step"), [0]),))

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile, fused=True)


def all_gradients(profile: Profile, phases: list[int] | range) -> Transfer:
    """Return BSP's transfer of all gradients, active in `phases`."""
    size = len(profile.buckets)
    return transfer(
        "grad",
        range(size),
        after=Moment("grad", size - 1),
        before=Moment("step"),
        phases=phases,
        link=profile.default_link.name,
    )
