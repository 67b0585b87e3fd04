"""offbeat: data-parallel training over networks too slow for DistributedDataParallel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.core.parts import register_parts

if TYPE_CHECKING:
    from offbeat.core.checkpoint import Checkpoint, Saving, iteration, load, save
    from offbeat.core.plan import Plan
    from offbeat.core.profile import Profile
    from offbeat.core.runtime.prepare import prepare
    from offbeat.core.sim.trace import Trace
    from offbeat.data.shortest import join
    from offbeat.elastic.members import Members
    from offbeat.jobs.reported import report_metric
    from offbeat.rehearsal.rehearse import RehearsedCurve, rehearse
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
        Planned,
        SelSync,
        Strategy,
        USByte,
    )

__version__ = "0.2.0"

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
    "Members",
    "OuterSGD",
    "PartialSync",
    "Plan",
    "Planned",
    "Profile",
    "RehearsedCurve",
    "Saving",
    "SelSync",
    "Strategy",
    "Trace",
    "USByte",
    "iteration",
    "join",
    "load",
    "prepare",
    "rehearse",
    "report_metric",
    "save",
]


_MODULES = {
    "Checkpoint": "core.checkpoint",
    "Members": "elastic.members",
    "Plan": "plan",
    "Profile": "profile",
    "RehearsedCurve": "rehearsal.rehearse",
    "Saving": "core.checkpoint",
    "Trace": "core.sim.trace",
    "iteration": "core.checkpoint",
    "join": "data.shortest",
    "load": "core.checkpoint",
    "prepare": "core.runtime.prepare",
    "rehearse": "rehearsal.rehearse",
    "report_metric": "jobs.reported",
    "save": "core.checkpoint",
}


register_parts(
    (
        "offbeat.core.runtime.flat_session:open_plan_session",
        "offbeat.core.sim.prediction:predict_under",
        "offbeat.elastic.entry:enter_job",
        "offbeat.elastic.entry:require_members",
        "offbeat.elastic.profile:for_members",
        "offbeat.elastic.profile:plan_of_members",
        "offbeat.elastic.session:MemberSession",
        "offbeat.jobs.meter:open_meter",
        "offbeat.jobs.metrics:metrics_of",
        "offbeat.jobs.machine_load:LoadSampler",
        "offbeat.jobs.machine_load:disturbing_share",
        "offbeat.jobs.observer:join_observer",
        "offbeat.jobs.observer:open_observer",
        "offbeat.jobs.replica_sample:Sample",
        "offbeat.jobs.settings:read_settings",
        "offbeat.jobs.startup:gpu_of",
        "offbeat.jobs.startup:startup_message",
        "offbeat.jobs.startup:startup_notices",
        "offbeat.jobs.stopping:StopRequest",
        "offbeat.lab.beside_compute:ComputeLoad",
        "offbeat.lab.beside_compute:measure_beside",
        "offbeat.lab.pace:Pace",
        "offbeat.lab.pace:paced_profile",
        "offbeat.lab.turns:Turns",
        "offbeat.strategies.convergence:ConvergenceGuard",
        "offbeat.strategies.convergence:Metering",
        "offbeat.strategies.levels:two_levels",
        "offbeat.strategies.levels:variant_of",
        "offbeat.strategies.schedulers:SchedulerGate",
    )
)


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that planning does not import torch."""
    if name in __all__:
        return getattr(import_module(f"offbeat.{_MODULES.get(name, 'strategies')}"), name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
