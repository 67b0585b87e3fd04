"""Strategy PS-BSP: bulk-synchronous training over parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.server.ssp import SSP


@dataclass(frozen=True)
class PSBSP(SSP):
    """Bulk-synchronous training over parameter servers: `SSP(s=0)`.

    Every worker pushes its gradients. The servers step with the average once all workers have
    pushed. Every worker pulls the parameters before its next iteration. All settings of SSP but `s`
    and `apply` remain.
    """

    s: ClassVar[int] = 0  # type: ignore[misc] # a constant, not a setting
    apply: ClassVar[Literal["clock", "push"]] = "clock"  # type: ignore[misc]

    name: ClassVar[str] = "ps-bsp"
    synchronous: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
    )
