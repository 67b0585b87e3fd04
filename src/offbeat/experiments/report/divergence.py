"""Distance between replicas, estimated from the parameter samples of all ranks."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping

import numpy as np

from offbeat.experiments.record.run_directory import RankRecord, Repetition
from offbeat.experiments.report.gossip import clock_differences_s
from offbeat.experiments.report.losses import Curve

Table = dict[int, np.ndarray]  # sample after each iteration, by iteration


def distance_curve(rep: Repetition) -> Curve:
    """Return the root mean square distance of the replicas from their average.

    It is in percent of the average's norm. The curve is empty without samples or with one rank.
    """
    distances, ends, first = relative_distances(rep), _ends_s(rep), rep.trace.first
    seconds = tuple(float(ends[i - first]) for i in distances)
    return Curve(tuple(distances), seconds, tuple(100 * x for x in distances.values()))


def gamma(rep: Repetition) -> dict[int, float]:
    """Return Gamma by iteration, estimated from the sample.

    Gamma is the mean over ranks of the squared distance from the average of all replicas.

    Source: DreamDDP, Theorem 1.
    """
    return {i: spread for i, (spread, _) in _moments(rep).items()}


def relative_distances(rep: Repetition) -> dict[int, float]:
    """Return by iteration the square root of Gamma divided by the norm of the average."""
    return {
        i: math.sqrt(spread / square) if square else math.inf if spread else 0.0
        for i, (spread, square) in _moments(rep).items()
    }


def _ends_s(rep: Repetition) -> np.ndarray:
    """Return the ends of iterations: the mean over ranks, or the first rank's ends in gossip."""
    rows = rep.trace.ends_s if clock_differences_s(rep) is None else rep.trace.ends_s[:1]
    return np.reshape([*zip(*rows, strict=False)], (-1, len(rows))).mean(axis=1)


def _moments(rep: Repetition) -> dict[int, tuple[float, float]]:
    """Return Gamma and the squared norm of the average by iteration."""
    tables = [_sample_table(record) for record in rep.ranks if record.sample]
    if len(tables) < 2 or len(tables) < len(rep.ranks):
        return {}
    ahead = clock_differences_s(rep)
    tables = _select_ended(rep, tables) if ahead is None else _align_by_time(rep, tables, ahead)
    moments = {}
    for i in sorted(set.intersection(*(set(table) for table in tables))):
        numbers = np.array([table[i] for table in tables])
        weight = rep.ranks[0].sample["weight"]  # type: ignore[index]
        mean = numbers.mean(axis=0)
        distances = ((numbers - mean) ** 2).sum(axis=1)
        moments[i] = weight * float(distances.mean()), weight * float((mean**2).sum())
    return moments


def _select_ended(rep: Repetition, tables: list[Table]) -> list[Table]:
    """Keep the samples of iterations in the trace."""
    trace = rep.trace
    own = range(trace.first, trace.first + trace.iterations)
    return [{i: numbers for i, numbers in table.items() if i in own} for table in tables]


def _align_by_time(rep: Repetition, tables: list[Table], ahead: Mapping[int, float]) -> list[Table]:
    """Return the samples of all ranks at the times of the first rank's samples.

    Without a plan, iterations with the same number are not simultaneous. Times after the first end
    of a rank are excluded.
    """
    ends = {
        record.rank: dict(enumerate(np.array(record.trace.ends_s[0]) + ahead[record.rank]))
        for record in rep.ranks
    }
    until = min(max(own.values(), default=-math.inf) for own in ends.values())
    first = ends[rep.ranks[0].rank]
    at = {i: first[i] for i in tables[0] if i in first and first[i] <= until}
    aligned = []
    for record, table in zip(rep.ranks, tables, strict=True):
        own = ends[record.rank]
        iterations = [i for i in sorted(table) if i in own]
        known = np.searchsorted([own[i] for i in iterations], [*at.values()], side="right")
        aligned.append(
            {i: table[iterations[n - 1]] for i, n in zip(at, known.tolist(), strict=True) if n}
        )
    return aligned


def _sample_table(record: RankRecord) -> Table:
    sample = record.sample or {}
    numbers = np.frombuffer(base64.b64decode(sample["numbers"]), dtype="<f8")
    iterations = sample["iterations"]
    return dict(zip(iterations, numbers.reshape(max(len(iterations), 1), -1), strict=False))
