"""offbeat: data-parallel training over networks too slow for DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies import (
    ADPSGD,
    ASCWFBP,
    BSP,
    DDP,
    P3,
    PSBSP,
    SSP,
    WFBP,
    A2CiD2,
    ByteScheduler,
    Cyclic,
    DeAR,
    DeFT,
    DreamDDP,
    FedAvg,
    LocalSGD,
    PartialSync,
    PSSelSync,
    SelSync,
    Strategy,
    USByte,
)
from offbeat.trace import Trace

if TYPE_CHECKING:
    from offbeat.runtime import prepare

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "ASCWFBP",
    "BSP",
    "DDP",
    "P3",
    "PSBSP",
    "SSP",
    "WFBP",
    "A2CiD2",
    "ByteScheduler",
    "Cyclic",
    "DeAR",
    "DeFT",
    "DreamDDP",
    "FedAvg",
    "LocalSGD",
    "PSSelSync",
    "PartialSync",
    "Plan",
    "Profile",
    "SelSync",
    "Strategy",
    "Trace",
    "USByte",
    "prepare",
]


def __getattr__(name: str) -> Any:
    """`prepare` is fetched when first used: it alone needs torch, planning does not."""
    if name == "prepare":
        from offbeat.runtime import prepare

        return prepare
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
