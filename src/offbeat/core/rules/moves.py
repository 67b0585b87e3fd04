"""Copies and arithmetic between the buffers of one worker."""

from __future__ import annotations

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    conserves=True,
    source=Setting("buffer", use="reads"),
    target=Setting("buffer"),
)
def add(context: Context, apply: Apply) -> None:
    """Compute `target += source`."""
    sources = context.read(apply.arg("source"), apply.buckets)
    targets = context.write(apply.arg("target"), apply.buckets)
    for target, source in zip(targets, sources, strict=True):
        target += source


@rule(
    conserves=True,
    source=Setting("buffer", use="reads"),
    target=Setting("buffer", use="writes"),
)
def copy(context: Context, apply: Apply) -> None:
    """Compute `target = source`."""
    sources = context.read(apply.arg("source"), apply.buckets)
    targets = context.write(apply.arg("target"), apply.buckets)
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


@rule(conserves=True, buffer=Setting("buffer", use="writes"))
def clear(context: Context, apply: Apply) -> None:
    """Compute `buffer = 0`."""
    for array in context.write(apply.arg("buffer"), apply.buckets):
        array[...] = 0


@rule(conserves=False, buffer=Setting("buffer"), by=Setting("numbers"))
def scale(context: Context, apply: Apply) -> None:
    """Compute `buffer *= by[rank]`: the weight of this worker in an average."""
    for array in context.write(apply.arg("buffer"), apply.buckets):
        array *= apply.arg("by")[context.rank]


@rule(
    conserves=False,
    a=Setting("buffer", kind="param"),
    b=Setting("buffer", kind="param"),
)
def swap(context: Context, apply: Apply) -> None:
    """Exchange the parameters of two buffers. Running statistics are not exchanged."""
    context.swap(apply.arg("a"), apply.arg("b"), apply.buckets)
