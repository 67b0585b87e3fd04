"""Moves between buffers of one worker, and arithmetic on one of them."""

from __future__ import annotations

from offbeat.numerics.base import Context, Setting, takes
from offbeat.plan import Apply


@takes(source=Setting("buffer"), target=Setting("buffer"))
def add(context: Context, apply: Apply) -> None:
    """`target += source`."""
    sources = context.read(apply.arg("source"), apply.buckets)
    targets = context.write(apply.arg("target"), apply.buckets)
    for target, source in zip(targets, sources, strict=True):
        target += source


@takes(source=Setting("buffer"), target=Setting("buffer"))
def copy(context: Context, apply: Apply) -> None:
    """`target = source`."""
    sources = context.read(apply.arg("source"), apply.buckets)
    targets = context.write(apply.arg("target"), apply.buckets)
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


@takes(buffer=Setting("buffer"))
def clear(context: Context, apply: Apply) -> None:
    """`buffer = 0`."""
    for array in context.write(apply.arg("buffer"), apply.buckets):
        array[...] = 0


@takes(buffer=Setting("buffer"), by=Setting("numbers"))
def scale(context: Context, apply: Apply) -> None:
    """`buffer *= by[rank]`: the weight of this worker in an average."""
    for array in context.write(apply.arg("buffer"), apply.buckets):
        array *= apply.arg("by")[context.rank]


@takes(a=Setting("buffer", kind="param"), b=Setting("buffer", kind="param"))
def swap(context: Context, apply: Apply) -> None:
    """Exchange the parameters of two buffers; running statistics stay where they are."""
    context.swap(apply.arg("a"), apply.arg("b"), apply.buckets)
