"""Selection of the workers that take part in an average (FedAvg)."""

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
    """Compute `buffer *= K n_r / sum(n)` on the workers of the round, and `buffer = 0` on the
    others.

    K is the number of workers and n are the `samples` of the drawn workers. So the mean over all
    workers is the average over the drawn workers, weighted by `samples`. Each round draws a share
    `fraction` of the workers, the same on all ranks. With an `anchor`, which is equal on all
    workers, the difference from the anchor is multiplied. The mean is the same, and small
    differences keep their precision. Running statistics are always multiplied themselves.

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017.
    """
    buffer = apply.arg("buffer")
    done = context.recall(f"rounds of {buffer}") or 0
    context.keep(f"rounds of {buffer}", done + 1)
    samples: Sequence[float] = apply.arg("samples")
    weights = draw_samples(samples, apply.arg("fraction", 1.0), apply.arg("seed", 0), done)
    share = len(samples) * weights[context.rank] / sum(weights)
    for w, anchor in _anchor_pairs(context, apply):
        w -= anchor
    for array in context.write(buffer, apply.buckets):
        if share:
            array *= share
        else:  # also replaces values that are not finite
            array[...] = 0
    for w, anchor in _anchor_pairs(context, apply):
        w += anchor


def _anchor_pairs(context: Context, apply: Apply) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of views of the buffer and the anchor; none without an anchor."""
    names = apply.arg("buffer"), apply.arg("anchor")
    if names[1] is not None:
        yield from zip(*(context.parameters(name, apply.buckets) for name in names), strict=True)


def draw_samples(samples: Sequence[float], fraction: float, seed: int, done: int) -> list[float]:
    """Return the samples of each worker, or 0 if the worker is not drawn.

    If no drawn worker has samples, return 1 for each of them: they count equally.

    Args:
        samples: number of samples of each worker.
        fraction: share of the workers to draw.
        seed: seed of the draw.
        done: number of previous rounds.
    """
    count = max(1, round(fraction * len(samples)))
    chosen = set(Random(f"{seed} {done}").sample(range(len(samples)), count))
    if not any(samples[rank] for rank in chosen):
        samples = [1.0] * len(samples)
    return [number if rank in chosen else 0 for rank, number in enumerate(samples)]
