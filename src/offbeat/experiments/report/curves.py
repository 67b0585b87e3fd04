"""Loss curves of the page: one curve per contestant with its range over repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from offbeat.experiments.record.run_directory import Contestant, Repetition
from offbeat.experiments.report.losses import Curve
from offbeat.experiments.report.summary import Row, counted_curve, counted_seconds
from offbeat.experiments.report.votes import Votes, votes_of

MOST_POINTS = 240


def draw(contestant: Contestant, row: Row) -> dict[str, Any] | None:
    """Return the loss curve of a contestant in JSON form; None without losses.

    The curve holds the smoothed mean over ranks and repetitions, the lowest and highest repetition,
    the mean before smoothing, the votes, and the point that reached the target.
    """
    raw = [curve for rep in contestant.complete if len(curve := counted_curve(rep))]
    smooth = [curve.smooth() for curve in raw]
    shared = sorted(set.intersection(*(set(curve.iterations) for curve in smooth))) if raw else []
    if not shared:
        return None
    shared = _select_points(shared)
    losses = [_values_at(curve, shared, curve.losses) for curve in smooth]
    data: dict[str, Any] = {
        "iterations": [i + 1 for i in shared],
        "seconds": _means([_values_at(curve, shared, curve.seconds) for curve in smooth]),
        "mean": _means(losses),
        "raw": _unsmoothed_curve(raw),
    }
    if len(raw) > 1:
        columns = list(zip(*losses, strict=True))
        data |= {
            "low": [_round_value(min(c)) for c in columns],
            "high": [_round_value(max(c)) for c in columns],
        }
    if (votes := votes_of(contestant.complete[0])) is not None:
        data["votes"] = _vote_marks(contestant.complete[0], votes)
    if row.target_s is not None and row.target_iterations is not None:
        data["hit"] = {"seconds": row.target_s, "iterations": row.target_iterations}
    return data


def _vote_marks(rep: Repetition, votes: Votes) -> list[dict[str, Any]]:
    """Return the iterations with a yes of each rank, thinned to about `MOST_POINTS` per rank."""
    first, ends_s = rep.trace.first, rep.trace.ends_s[0]
    width = max(1, -(-len(votes.iterations) // MOST_POINTS))
    marks, seconds_of = [], counted_seconds(rep)
    for record in rep.ranks:
        said = list({i // width: i for i in votes.yes_iterations(record.rank)}.values())
        said = [i for i in said if first <= i < first + len(ends_s)]
        seconds = [_round_value(seconds_of(i, ends_s[i - first])) for i in said]
        marks.append({"rank": record.rank, "iterations": [i + 1 for i in said], "seconds": seconds})
    return marks


def _unsmoothed_curve(raw: Sequence[Curve]) -> dict[str, Any]:
    shared = _select_points(sorted(set.intersection(*(set(curve.iterations) for curve in raw))))
    return {
        "iterations": [i + 1 for i in shared],
        "seconds": _means([_values_at(curve, shared, curve.seconds) for curve in raw]),
        "mean": _means([_values_at(curve, shared, curve.losses) for curve in raw]),
    }


def _values_at(curve: Curve, iterations: Sequence[int], values: Sequence[float]) -> list[float]:
    table = dict(zip(curve.iterations, values, strict=True))
    return [table[i] for i in iterations]


def _means(columns: Sequence[Sequence[float]]) -> list[float | None]:
    return [_round_value(fmean(values)) for values in zip(*columns, strict=True)]


def _round_value(value: float) -> float | None:
    """Round to five significant digits. None, a gap in the line, if not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _select_points(items: list[int]) -> list[int]:
    """Return at most `MOST_POINTS` evenly spaced items, with the first and the last."""
    if len(items) <= MOST_POINTS:
        return items
    step = (len(items) - 1) / (MOST_POINTS - 1)
    return [items[round(i * step)] for i in range(MOST_POINTS)]
