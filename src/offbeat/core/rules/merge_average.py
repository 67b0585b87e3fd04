"""Merge of an average, which may be delayed, with the local parameters of a worker."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    reads=("param",),
    writes=("param",),
    conserves=False,
    share=Setting("number", 0.5, least=0.0, most=1.0, contracts=True),
    source=Setting("buffer", "average", kind="param", use="reads"),
)
def blend(context: Context, apply: Apply) -> None:
    """Compute `w = share w + (1 - share) source`.

    Source: Douillard et al., Streaming DiLoCo, 2025, Section 2.3, where `share` is alpha.
    """
    share = apply.arg("share", 0.5)
    sources = context.read(apply.arg("source", "average"), apply.buckets)
    for w, source in zip(context.write("param", apply.buckets), sources, strict=True):
        w *= share
        w += (1 - share) * source


@rule(
    reads=("param",),
    writes=("param",),
    conserves=True,
    average=Setting("buffer", "average", kind="param", use="reads"),
    snapshot=Setting("buffer", "snapshot", kind="param", use="reads"),
    kept=Setting("number", 0.0, least=0.0, most=1.0, contracts=True),
)
def delta(context: Context, apply: Apply) -> None:
    """Compute `w += (1 - kept) (average - snapshot)`, where `average` holds the mean of all
    snapshots.

    Local steps since the snapshot remain. `kept` is the share of the difference that is not
    corrected.
    """
    kept = apply.arg("kept", 0.0)
    parameters = context.write("param", apply.buckets)
    averages = context.read(apply.arg("average", "average"), apply.buckets)
    snapshots = context.read(apply.arg("snapshot", "snapshot"), apply.buckets)
    for w, average, snapshot in zip(parameters, averages, snapshots, strict=True):
        if kept:
            w += (1 - kept) * (average - snapshot)
        else:
            w += average
            w -= snapshot
