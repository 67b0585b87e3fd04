"""Blend of the local parameters of a worker with the average of all workers."""

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
