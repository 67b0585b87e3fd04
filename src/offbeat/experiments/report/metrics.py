"""Curves of the metrics that a script reports, and the target that a run is measured by."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from offbeat.experiments.record.run_directory import Contestant, Repetition
from offbeat.experiments.report.losses import Curve


def metric_names(reps: Iterable[Repetition]) -> list[str]:
    """Return the names of all reported metrics, in order of appearance."""
    return list(dict.fromkeys(n for rep in reps for record in rep.ranks for n in record.metrics))


def metric_curve(rep: Repetition, name: str) -> Curve:
    """Return the mean of a metric over the ranks that reported it, at each of their iterations."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for record in rep.ranks:
        for iteration, seconds, value in record.metrics.get(name, ()):
            found[iteration].append((seconds, value))
    order = sorted(found)
    return Curve(
        tuple(order),
        tuple(fmean(seconds for seconds, _ in found[i]) for i in order),
        tuple(fmean(value for _, value in found[i]) for i in order),
    )


def final_metrics(contestant: Contestant) -> dict[str, float]:
    """Return the last value of each metric, mean over repetitions."""
    reps = contestant.complete
    ends = {
        name: [curve.losses[-1] for rep in reps if len(curve := metric_curve(rep, name))]
        for name in metric_names(reps)
    }
    means = {name: fmean(values) for name, values in ends.items() if values}
    return {name: value for name, value in means.items() if math.isfinite(value)}


def rises(contestants: Iterable[Contestant], name: str, target: float) -> bool:
    """Return whether a metric reaches its target from below: it rises in all runs together, or it
    does not change, and all runs begin below."""
    curves = [metric_curve(rep, name) for one in contestants for rep in one.complete]
    ends = [(curve.losses[0], curve.losses[-1]) for curve in curves if len(curve)]
    change = sum(last - first for first, last in ends)
    return change > 0 if change else all(first < target for first, _ in ends)


def reach(curve: Curve, target: float, *, rising: bool) -> tuple[int, float] | None:
    """Return (iteration, seconds) at which a metric reaches its target; None if it does not.

    Args:
        curve: values of the metric.
        target: value to reach.
        rising: whether the metric rises during training, so that it reaches a target from below.
    """
    if rising:
        flipped = tuple(-value for value in curve.losses)
        return Curve(curve.iterations, curve.seconds, flipped).reach(-target)
    return curve.reach(target)


def as_columns(curve: Curve) -> dict[str, Any]:
    """Return a curve in JSON form. Iterations count from 1."""
    return {
        "iterations": [i + 1 for i in curve.iterations],
        "seconds": [float(f"{s:.6g}") for s in curve.seconds],
        "values": [float(f"{v:.6g}") if math.isfinite(v) else None for v in curve.losses],
    }
