"""BSP: one average of all gradients after backward, before the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.core.plan import Kind, Moment, Plan, Transfer, local, transfer
from offbeat.core.profile import Profile
from offbeat.strategies.compressible import Synchronous


@dataclass(frozen=True)
class BSP(Synchronous):
    """Bulk-synchronous SGD (S-SGD): one all-reduce of all gradients after backward."""

    name: ClassVar[str] = "bsp"
    citation: ClassVar[str] = "Valiant, A bridging model for parallel computation, CACM 1990"

    def schedule(self, profile: Profile) -> Plan:
        size = len(profile.buckets)
        messages = all_gradients(profile, phases=[0])
        return Plan(self.name, size, tuple(messages), (local(size, Moment("step"), [0]),))


def all_gradients(profile: Profile, phases: Iterable[int]) -> list[Transfer]:
    """Return BSP's transfer of all gradients, active in `phases`."""
    size = len(profile.buckets)
    ready = Moment("grad", size - 1)
    return averages(
        profile, ["grad"], range(size), after=ready, before=Moment("step"), phases=phases
    )


def averages(
    profile: Profile, kinds: Iterable[Kind], buckets: range, **fields: Any
) -> list[Transfer]:
    """Return the transfers of an average of buckets on the default link, one for each kind of
    buffer. `fields` are those of `transfer`."""
    link = profile.default_link.name
    return [transfer(kind, buckets, link=link, **fields) for kind in kinds]
