"""Options that integrations pass to `offbeat.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from torch.distributed.device_mesh import DeviceMesh

from offbeat.core.guards.finite import OnNonfinite
from offbeat.core.profile import Profile
from offbeat.core.transport.topology import Nodes
from offbeat.elastic.members import Members
from offbeat.jobs.metrics import Log, Metrics


class Options(TypedDict, total=False):
    """Keyword arguments of `offbeat.prepare`."""

    profile: Profile | str | Path | None
    links: Sequence[str] | None
    observe: int
    min_bucket_bytes: int | None
    timeout_s: float
    compare_every: int
    on_nonfinite: OnNonfinite
    broadcast_buffers: bool
    metrics: Metrics | Log | str | None
    record: str | Path | None
    mesh: DeviceMesh | None
    nodes: Nodes | None
    members: Members | None
