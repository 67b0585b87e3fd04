"""Strategies: one file per method, one line here (its import)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from offbeat.strategies.a2cid2 import A2CiD2
from offbeat.strategies.ad_psgd import ADPSGD
from offbeat.strategies.asc_wfbp import ASCWFBP
from offbeat.strategies.base import Monitor, StatePolicy, Strategy, require_choice
from offbeat.strategies.bsp import BSP
from offbeat.strategies.bytescheduler import ByteScheduler
from offbeat.strategies.cyclic import Cyclic
from offbeat.strategies.ddp import DDP
from offbeat.strategies.dear import DeAR
from offbeat.strategies.deft import DeFT
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.dreamddp import DreamDDP
from offbeat.strategies.fedavg import FedAvg
from offbeat.strategies.gossip import Gossip
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.outer import OuterSGD
from offbeat.strategies.p3 import P3
from offbeat.strategies.partial_sync import PartialSync
from offbeat.strategies.ps_bsp import PSBSP
from offbeat.strategies.ps_selsync import PSSelSync
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.served import Served
from offbeat.strategies.ssp import SSP
from offbeat.strategies.us_byte import USByte
from offbeat.strategies.wfbp import WFBP

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls
    for cls in sorted(
        (
            found
            for found in list(globals().values())
            if isinstance(found, type)
            and issubclass(found, Strategy)
            and found.planned
            and found is not Strategy
        ),
        # Those that compute what DDP computes come first, and DDP before all.
        key=lambda cls: (not cls.synchronous, cls is not DDP, cls.name),
    )
}
"""Those that the core runs, by a plan."""

SERVED: dict[str, type[Served]] = {cls.name: cls for cls in (PSBSP, PSSelSync, SSP)}
"""Those with a parameter server."""

GOSSIP: dict[str, type[Gossip]] = {cls.name: cls for cls in (A2CiD2, ADPSGD)}
"""Those whose workers exchange in pairs."""


def methods() -> dict[str, type[Strategy]]:
    """All of them by name."""
    return STRATEGIES | SERVED | GOSSIP


def create(name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Strategy from its name and settings; ValueError suggests the nearest of a misspelling."""
    require_choice("strategy", name, methods())
    cls = methods()[name]
    if "outer" in (settings or {}) and "outer" not in (f.name for f in fields(cls)):
        raise ValueError(
            f"outer must be left out with {name}: outer optimizers step on averages of parameters, "
            "which dreamddp, diloco, local-sgd and partial-sync make"
        )
    for key in settings or {}:
        require_choice(f"setting of {name}", key, [f.name for f in fields(cls)])
    return cls(**(settings or {}))


__all__ = [
    "ADPSGD",
    "ASCWFBP",
    "BSP",
    "DDP",
    "GOSSIP",
    "P3",
    "PSBSP",
    "SERVED",
    "SSP",
    "STRATEGIES",
    "WFBP",
    "A2CiD2",
    "ByteScheduler",
    "Cyclic",
    "DeAR",
    "DeFT",
    "DiLoCo",
    "DreamDDP",
    "FedAvg",
    "Gossip",
    "LocalSGD",
    "Monitor",
    "OuterSGD",
    "PSSelSync",
    "PartialSync",
    "SelSync",
    "Served",
    "StatePolicy",
    "Strategy",
    "USByte",
    "create",
    "methods",
]
