"""Delayed averaging: local steps continue while an earlier snapshot is averaged."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    reads=("param",),
    writes=("param",),
    conserves=True,
    average=Setting("buffer", "average", kind="param", use="reads"),
    snapshot=Setting("buffer", "snapshot", kind="param", use="reads"),
)
def delta(context: Context, apply: Apply) -> None:
    """Compute `w += average - snapshot`, where `average` holds the mean of all snapshots."""
    parameters = context.write("param", apply.buckets)
    averages = context.read(apply.arg("average", "average"), apply.buckets)
    snapshots = context.read(apply.arg("snapshot", "snapshot"), apply.buckets)
    for w, average, snapshot in zip(parameters, averages, snapshots, strict=True):
        w += average
        w -= snapshot
