"""Selecting the workers that count in an average (FedAvg)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from offbeat.core.plan import Apply
from offbeat.core.rules.vocabulary import Context, Setting, rule


@rule(
    conserves=False,
    by_bucket=False,
    buffer=Setting("buffer"),
    samples=Setting("numbers"),
    fraction=Setting("number", 1.0, least=0, most=1),
    seed=Setting("count", 0),
    anchor=Setting("buffer", kind="param", optional=True, use="reads", origin=True),
)
def select(context: Context, apply: Apply) -> None:
    """`buffer *= K n_r / sum(n)` over the workers drawn, 0 on the others.

    The mean over all workers is then the average of those drawn, weighted by their `samples`. A
    share `fraction` of the workers is drawn anew each time, the same on every rank. With an
    `anchor`, which is equal on all of them, it is the change against it that is multiplied: the
    mean is the same, and small changes stay small. Running statistics are multiplied in any case.
    Source: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017.
    """
    buffer = apply.arg("buffer")
    done = context.recall(f"rounds of {buffer}") or 0
    context.keep(f"rounds of {buffer}", done + 1)
    samples: Sequence[float] = apply.arg("samples")
    weights = draw_samples(samples, apply.arg("fraction", 1.0), apply.arg("seed", 0), done)
    share = len(samples) * weights[context.rank] / sum(weights)
    for w, anchor in _anchored(context, apply):
        w -= anchor
    for array in context.write(buffer, apply.buckets):
        if share:
            array *= share
        else:  # also where it is not finite
            array[...] = 0
    for w, anchor in _anchored(context, apply):
        w += anchor


def _anchored(context: Context, apply: Apply) -> Iterator[tuple[Any, Any]]:
    """Parameters and what changes are counted from; nothing without an anchor."""
    names = apply.arg("buffer"), apply.arg("anchor")
    if names[1] is not None:
        yield from zip(*(context.parameters(name, apply.buckets) for name in names), strict=True)


def draw_samples(samples: Sequence[float], fraction: float, seed: int, done: int) -> list[float]:
    """Of every worker its samples, or 0 if it is not drawn in the round after `done` ones."""
    count = max(1, round(fraction * len(samples)))
    chosen = set(Random(f"{seed} {done}").sample(range(len(samples)), count))
    return [number if rank in chosen else 0 for rank, number in enumerate(samples)]
