"""How far apart replicas were, from the sample of parameters that every rank has recorded."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition
from offbeat.experiments.report.gossip import clock_differences_s

Table = dict[int, np.ndarray]  # iteration: the sample after it


def draw(contestant: Contestant) -> dict[str, Any] | None:
    """JSON-ready curve, mean over repetitions: the replicas' root mean square distance from
    their mean, in percent of the mean's norm; None without samples or with a single rank."""
    found = [of for rep in contestant.complete if (of := relative_distances(rep))]
    if not found:
        return None
    shared = sorted(set.intersection(*(set(values) for values in found)))
    ends = [_ends_s(rep) for rep in contestant.complete]
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


def relative_distances(rep: Repetition) -> dict[int, float]:
    """By iteration: the root of Gamma over the norm of the mean."""
    return {
        i: math.sqrt(spread / square) if square else math.inf if spread else 0.0
        for i, (spread, square) in _moments(rep).items()
    }


def _ends_s(rep: Repetition) -> np.ndarray:
    """When iterations ended: mean over ranks, or the first rank's if each has a pace of its own."""
    rows = rep.trace.ends_s if clock_differences_s(rep) is None else rep.trace.ends_s[:1]
    return np.mean([*zip(*rows, strict=False)], axis=1)


def _moments(rep: Repetition) -> dict[int, tuple[float, float]]:
    """By iteration: Gamma, and the squared norm of the mean."""
    tables = [_sample_table(record) for record in rep.ranks if record.sample]
    if len(tables) < 2 or len(tables) < len(rep.ranks):
        return {}
    ahead = clock_differences_s(rep)
    tables = _select_ended(rep, tables) if ahead is None else _align_by_time(rep, tables, ahead)
    found = {}
    for i in sorted(set.intersection(*(set(table) for table in tables))):
        numbers = np.array([table[i] for table in tables])
        weight = rep.ranks[0].sample["weight"]  # type: ignore[index]
        mean = numbers.mean(axis=0)
        distances = ((numbers - mean) ** 2).sum(axis=1)
        found[i] = weight * float(distances.mean()), weight * float((mean**2).sum())
    return found


def _select_ended(rep: Repetition, tables: list[Table]) -> list[Table]:
    """Of the iterations that the trace has."""
    trace = rep.trace
    own = range(trace.first, trace.first + trace.iterations)
    return [{i: numbers for i, numbers in table.items() if i in own} for table in tables]


def _align_by_time(rep: Repetition, tables: list[Table], ahead: Mapping[int, float]) -> list[Table]:
    """What every rank had when the first one took its samples, while all were computing: without
    a plan iterations of one number are not at one time."""
    ends = {
        record.rank: dict(enumerate(np.array(record.trace.ends_s[0]) + ahead[record.rank]))
        for record in rep.ranks
    }
    until = min(max(own.values(), default=-math.inf) for own in ends.values())
    first = ends[rep.ranks[0].rank]
    at = {i: first[i] for i in tables[0] if i in first and first[i] <= until}
    found = []
    for record, table in zip(rep.ranks, tables, strict=True):
        own = ends[record.rank]
        iterations = [i for i in sorted(table) if i in own]
        known = np.searchsorted([own[i] for i in iterations], [*at.values()], side="right")
        found.append(
            {i: table[iterations[n - 1]] for i, n in zip(at, known.tolist(), strict=True) if n}
        )
    return found


def _sample_table(record: RankRecord) -> Table:
    sample = record.sample or {}
    numbers = np.frombuffer(base64.b64decode(sample["numbers"]), dtype="<f8")
    iterations = sample["iterations"]
    return dict(zip(iterations, numbers.reshape(max(len(iterations), 1), -1), strict=False))
