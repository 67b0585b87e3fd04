"""offbeat: data-parallel training over networks too slow for DistributedDataParallel."""

from __future__ import annotations

from importlib import import_module
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
    from offbeat.data.joined import join
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
    "join",
    "prepare",
]


_NEED_TORCH = {"join": "offbeat.data.joined", "prepare": "offbeat.runtime"}


def __getattr__(name: str) -> Any:
    """What needs torch is fetched when first used: planning does not need it."""
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
