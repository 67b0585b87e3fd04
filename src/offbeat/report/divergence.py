"""How far apart replicas were, from the sample of parameters that every rank has recorded."""

from __future__ import annotations

import base64
import math
from statistics import fmean
from typing import Any

import numpy as np

from offbeat.report.run import Contestant, RankRecord, Repetition


def draw(contestant: Contestant) -> dict[str, Any] | None:
    """JSON-ready curve, mean over repetitions: the replicas' root mean square distance from
    their mean, in percent of the mean's norm; None without samples or with a single rank."""
    found = [of for rep in contestant.complete if (of := relative(rep))]
    if not found:
        return None
    shared = sorted(set.intersection(*(set(values) for values in found)))
    ends = [np.mean([*zip(*rep.trace.ends_s, strict=False)], axis=1) for rep in contestant.complete]
    first = contestant.complete[0].trace.first
    means = [fmean(values[i] for values in found) for i in shared]
    curve = {
        "iterations": [i + 1 for i in shared],
        "seconds": [float(fmean(e[i - first] for e in ends)) for i in shared],
        "mean": [float(f"{100 * x:.4g}") if math.isfinite(x) else None for x in means],
    }
    return {**curve, "raw": curve}


def gamma(rep: Repetition) -> dict[int, float]:
    """By iteration: Gamma, the mean over ranks of the squared distance from the mean of all
    replicas (DreamDDP, Theorem 1), estimated from the sample."""
    return {i: spread for i, (spread, _) in _moments(rep).items()}


def relative(rep: Repetition) -> dict[int, float]:
    """By iteration: the root of Gamma over the norm of the mean."""
    return {
        i: math.sqrt(spread / square) if square else math.inf if spread else 0.0
        for i, (spread, square) in _moments(rep).items()
    }


def _moments(rep: Repetition) -> dict[int, tuple[float, float]]:
    """By iteration: Gamma, and the squared norm of the mean."""
    tables = [_table(record) for record in rep.ranks if record.sample]
    if len(tables) < 2 or len(tables) < len(rep.ranks):
        return {}
    first, last = rep.trace.first, rep.trace.first + rep.trace.iterations
    found = {}
    for i in sorted(set.intersection(*(set(table) for table in tables))):
        if first <= i < last:
            numbers = np.array([table[i] for table in tables])
            weight = rep.ranks[0].sample["weight"]  # type: ignore[index]
            mean = numbers.mean(axis=0)
            distances = ((numbers - mean) ** 2).sum(axis=1)
            found[i] = weight * float(distances.mean()), weight * float((mean**2).sum())
    return found


def _table(record: RankRecord) -> dict[int, np.ndarray]:
    sample = record.sample or {}
    numbers = np.frombuffer(base64.b64decode(sample["numbers"]), dtype="<f8")
    iterations = sample["iterations"]
    return dict(zip(iterations, numbers.reshape(max(len(iterations), 1), -1), strict=False))
