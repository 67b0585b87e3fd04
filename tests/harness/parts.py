"""Parts below the public level that protected tests compare with references.

A redesign that moves a part changes this table, and no protected test. Parts are imported at their
first use, so that tests of plans and of the simulator need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PARTS = {
    "core.buckets.flat": "Flat place_like",
    "core.buckets.layout": "group_parameters",
    "core.buckets.optimizer_state": "StateStore",
    "core.checkpoint.folder": "Folder",
    "core.codecs": "WIRES codec",
    "core.codecs.pieces": "PIECE",
    "core.codecs.tensor_codecs": "code",
    "core.derive.deferred": "defer_updates",
    "core.derive.windows": "Windows",
    "core.guards.parameters": "ParameterWatch",
    "core.guards.script_usage": "conflict_with",
    "core.measuring.tournament": "partners",
    "core.plan.program": "Program",
    "core.plan.types": "POINTS",
    "core.profile.elsewhere": "network_rate_bps",
    "core.rules": "RULES",
    "core.rules.select": "draw_samples",
    "elastic.samples": "MemberSamples",
    "core.runtime.prepare": "prepare",
    "core.runtime.prepared": "Model",
    "core.sim": "event_engine fast_engine",
    "core.sim.fluid": "coupled_links",
    "core.sim.outcomes": "Outcomes",
    "core.sim.simulation": "make_job to_trace",
    "core.sim.trace": "COMPUTE",
    "core.strategy.parsing": "parse",
    "core.strategy.registry": "module_names setting_names",
    "core.transport.cluster": "connect",
    "core.transport.collectives": "Scratch via_host",
    "core.transport.device": "CPU",
    "core.transport.failure_detector": "traffic_bps",
    "core.transport.interfaces": "LinkSpec",
    "core.transport.listeners": "open_listener",
    "core.transport.topology": "NodeClaim",
    "core.verify.check": "shorten_phases slices_of",
    "core.verify.interpreter": "Interpreter",
    "core.verify.worker": "InterpretedModel",
    "cyclic.timetable": "Placement Timetable Work",
    "data.place": "place",
    "data.sample_stream": "SampleStream",
    "frames.frames": "WireError",
    "gossip": "mixing",
    "integrations.options": "Options",
    "jobs.record_lines": "load",
    "server.layout": "Layout",
    "server.optimizers": "checked_settings require_elementwise settings_of",
    "server.parameters": "Store",
    "strategies.dreamddp.late": "Planning best_order exchanged",
    "strategies.dreamddp.sets": "Cycle algorithm_2 balanced cheaper_sets fill",
    "strategies.dreamddp.strategy": "cycle_of",
    "strategies.levels": "two_levels",
    "strategies.methods.des_loc": "moment_count",
    "strategies.methods.noloco": "draw_pairs",
    "strategies.wfbp": "gradients_when_ready message_seconds",
}
_MODULES = {name: module for module, names in PARTS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a part, or a module among the parts."""
    if name not in _MODULES:
        raise AttributeError(name)
    module = f"offbeat.{_MODULES[name]}"
    found = getattr(import_module(module), name, None)
    return import_module(f"{module}.{name}") if found is None else found
