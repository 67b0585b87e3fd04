"""offbeat: data-parallel training over networks too slow for DistributedDataParallel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.checkpoint import Checkpoint, Saving, iteration, load, save
    from offbeat.data.joined import join
    from offbeat.plan import Plan
    from offbeat.profile import Profile
    from offbeat.runtime import prepare
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
        DiLoCo,
        DreamDDP,
        FedAvg,
        LocalSGD,
        OuterSGD,
        PartialSync,
        SelSync,
        Strategy,
        USByte,
    )
    from offbeat.trace import Trace

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
    "Checkpoint",
    "Cyclic",
    "DeAR",
    "DeFT",
    "DiLoCo",
    "DreamDDP",
    "FedAvg",
    "LocalSGD",
    "OuterSGD",
    "PartialSync",
    "Plan",
    "Profile",
    "Saving",
    "SelSync",
    "Strategy",
    "Trace",
    "USByte",
    "iteration",
    "join",
    "load",
    "prepare",
    "save",
]


_MODULES = {
    "Checkpoint": "checkpoint",
    "Plan": "plan",
    "Profile": "profile",
    "Saving": "checkpoint",
    "Trace": "trace",
    "iteration": "checkpoint",
    "join": "data.joined",
    "load": "checkpoint",
    "prepare": "runtime",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: planning needs no torch, and a strategy no other one."""
    if name in __all__ or name == "PSSelSync":  # a former name
        return getattr(import_module(f"offbeat.{_MODULES.get(name, 'strategies')}"), name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
