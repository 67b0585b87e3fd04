"""Options: what integrations hand on to `offbeat.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from offbeat.guards.finite import OnNonfinite
from offbeat.metrics import Log, Metrics
from offbeat.profile import Profile


class Options(TypedDict, total=False):
    """The keyword arguments of `offbeat.prepare`."""

    profile: Profile | str | Path | None
    links: Sequence[str] | None
    observe: int
    min_bucket_bytes: int | None
    timeout_s: float
    compare_every: int
    on_nonfinite: OnNonfinite
    broadcast_buffers: bool
    metrics: Metrics | Log | None
