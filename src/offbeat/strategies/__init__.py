"""Strategies: one module per method, imported when its class is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.core.strategy.interface import (
    Needs,
    Planned,
    Strategy,
    periodic_bound_s,
    require_choice,
    synchronous_bound_s,
)
from offbeat.core.strategy.registry import (
    BUILT_IN,
    create,
    find,
    module_names,
    reference_of,
    setting_names,
    strategy_names,
)
from offbeat.strategies.equations import StatePolicy

if TYPE_CHECKING:
    from offbeat.gossip.strategies import ADPSGD, A2CiD2
    from offbeat.server.strategies import PSBSP, SSP
    from offbeat.strategies.asc_wfbp import ASCWFBP
    from offbeat.strategies.bsp import BSP
    from offbeat.strategies.cyclic import Cyclic
    from offbeat.strategies.ddp import DDP
    from offbeat.strategies.dear import DeAR
    from offbeat.strategies.deft import DeFT
    from offbeat.strategies.diloco import DiLoCo
    from offbeat.strategies.dreamddp import DreamDDP
    from offbeat.strategies.fedavg import FedAvg
    from offbeat.strategies.local_sgd import LocalSGD
    from offbeat.strategies.outer_optimizer import OuterSGD
    from offbeat.strategies.partial_sync import PartialSync
    from offbeat.strategies.priorities import P3, ByteScheduler, USByte
    from offbeat.strategies.selsync import SelSync
    from offbeat.strategies.wfbp import WFBP

_MODULES = {"OuterSGD": "offbeat.strategies.outer_optimizer"}
for _path in BUILT_IN.values():
    _module, _, _class = _path.partition(":")
    _MODULES[_class] = _module


def __getattr__(name: str) -> Any:
    """Import a strategy class on first access."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    for method in () if name.startswith("_") else module_names():
        if (cls := find(method)).__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "DiLoCo",
    "DreamDDP",
    "FedAvg",
    "LocalSGD",
    "Needs",
    "OuterSGD",
    "PartialSync",
    "Planned",
    "SelSync",
    "StatePolicy",
    "Strategy",
    "USByte",
    "create",
    "find",
    "periodic_bound_s",
    "reference_of",
    "require_choice",
    "setting_names",
    "strategy_names",
    "synchronous_bound_s",
]
