"""Charts of losses, of reported metrics and of the distance between replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from offbeat.core import words
from offbeat.experiments.record.run_directory import Contestant, Run
from offbeat.experiments.report import divergence
from offbeat.experiments.report.chart import Chart, Line, Values
from offbeat.experiments.report.headline import display_names
from offbeat.experiments.report.losses import SMOOTH, Curve
from offbeat.experiments.report.metrics import metric_curve, metric_names
from offbeat.experiments.report.summary import (
    Row,
    counted_curve,
    rank_rows,
    shift_curve,
)

MOST_POINTS = 240

Ordered = Sequence[tuple[Row, Contestant, str]]  # best first, with display names
Axis = Literal["seconds", "iterations"]
LONG = (("d", 86400.0), ("h", 3600.0))  # units of axes that are three times as long


@dataclass(frozen=True)
class MeanCurve:
    """Mean of the curves of all repetitions at the iterations that they share.

    Attributes:
        iterations: numbers of the iterations, counted from 1.
        seconds: mean of their times.
        mean: mean of the values; None if not finite.
        low: lowest repetition; empty for one repetition.
        high: highest repetition.
    """

    iterations: Sequence[float]
    seconds: Sequence[float]
    mean: Values
    low: Values = ()
    high: Values = ()


def mean_curve(curves: Sequence[Curve]) -> MeanCurve | None:
    """Return the mean of curves, thinned to `MOST_POINTS`; None if they share no iteration."""
    curves = [curve for curve in curves if len(curve)]
    shared = sorted(set.intersection(*(set(c.iterations) for c in curves))) if curves else []
    if not shared:
        return None
    shared = _select_points(shared)
    tables = [
        {i: (s, y) for i, s, y in zip(c.iterations, c.seconds, c.losses, strict=True)}
        for c in curves
    ]
    columns = [[table[i][1] for table in tables] for i in shared]
    several = columns if len(curves) > 1 else []
    return MeanCurve(
        [i + 1 for i in shared],
        [_round_value(fmean(table[i][0] for table in tables)) or 0.0 for i in shared],
        [_round_value(fmean(values)) for values in columns],
        [_round_value(min(values)) for values in several],
        [_round_value(max(values)) for values in several],
    )


def rank_contestants(run: Run, rows: Sequence[Row]) -> Ordered:
    """Return rows with their contestants and names, best first."""
    names, of = display_names(rows), {c.label: c for c in run.contestants}
    return [(row, of[row.label], names[row.label]) for row in rank_rows(rows)]


# --- charts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Losses of a strategy, before and after smoothing."""

    raw: MeanCurve
    smooth: MeanCurve

    @property
    def is_short(self) -> bool:
        """Whether the losses are too few to draw trailing means."""
        return len(self.raw.mean) < 4 * SMOOTH


def losses_of(order: Ordered) -> dict[str, Losses]:
    """Return the losses of the counted repetitions of each strategy that has some, by label."""
    found = {}
    for row, contestant, _ in order:
        curves = [counted_curve(rep) for rep in contestant.complete]
        raw, smooth = mean_curve(curves), mean_curve([curve.smooth() for curve in curves])
        if raw is not None and smooth is not None:
            found[row.label] = Losses(raw, smooth)
    return found


def loss_chart(order: Ordered, losses: Mapping[str, Losses], axis: Axis) -> Chart:
    """Return the losses; against seconds with bands and with the losses before smoothing."""
    target = next((row.target_loss for row, *_ in order if row.target_loss is not None), None)
    lines = []
    for row, _, name in order:
        if row.label not in losses:
            continue
        found = losses[row.label]
        curve = found.raw if found.is_short else found.smooth
        several = axis == "seconds" and not found.is_short
        lines.append(
            Line(
                name,
                _look(order, row),
                getattr(curve, axis),
                curve.mean,
                curve.low if several else (),
                curve.high if several else (),
                (found.raw.seconds, found.raw.mean) if several else None,
                _hit(row, axis, row.target_loss),
            )
        )
    line = None if target is None else (target, f"target {words.loss(target)}")
    return _chart(f"Training loss against {axis}", axis, lines, target=line)


def metric_charts(run: Run, order: Ordered, axis: Axis) -> dict[str, Chart]:
    """Return a chart of each reported metric by its name."""
    reps = [rep for _, contestant, _ in order for rep in contestant.complete]
    charts = {}
    for metric in metric_names(reps):
        value = run.target["value"] if run.target and run.target["name"] == metric else None
        lines = []
        for row, contestant, name in order:
            curves = [shift_curve(rep, metric_curve(rep, metric)) for rep in contestant.complete]
            if (own := mean_curve(curves)) is not None:
                look, hit = _look(order, row), _hit(row, axis, value)
                xs = getattr(own, axis)
                lines.append(Line(name, look, xs, own.mean, own.low, own.high, hit=hit))
        target = None if value is None else (value, f"target {value:g}")
        charts[metric] = _chart(f"{metric} against {axis}", axis, lines, target, "all")
    return charts


def distance_chart(order: Ordered) -> Chart:
    """Return the distances between replicas, in percent."""
    lines = []
    for row, contestant, name in order:
        own = mean_curve([divergence.distance_curve(rep) for rep in contestant.complete])
        if own is not None:
            lines.append(Line(name, _look(order, row), own.seconds, own.mean))
    return _chart(
        "Distance of replicas against seconds, in percent", "seconds", lines, None, "zero"
    )


def _chart(
    title: str,
    axis: Axis,
    lines: Sequence[Line],
    target: tuple[float, str] | None = None,
    reach: Literal["fall", "zero", "all"] = "fall",
) -> Chart:
    """Return a chart with the best strategy in front; hours and days in their unit."""
    known = [line for line in reversed(lines) if line.known_points]
    longest = max((line.xs[-1] for line in known), default=0.0)
    unit, scale = next((one for one in LONG if longest >= 3 * one[1]), ("s", 1.0))
    if axis == "iterations":
        unit, scale = "iterations", 1.0
    return Chart(title, unit, [line.scaled(scale) for line in known], target, reach)


def _look(order: Ordered, row: Row) -> str:
    return "best" if row is order[0][0] else "base" if row.is_yardstick else "other"


def _hit(row: Row, axis: Axis, value: float | None) -> tuple[float, float] | None:
    """Return the point at which a strategy reached the target."""
    at = row.target_s if axis == "seconds" else row.target_iterations
    return None if at is None or value is None else (at, value)


# --- texts -----------------------------------------------------------------------------


def loss_notes(run: Run, rows: Sequence[Row], losses: Mapping[str, Losses]) -> list[str]:
    """Return sentences about how the losses are drawn and about their limits."""
    known = losses.values()
    if not known:
        return []
    hosts = "mean over ranks" + " and repetitions" * any(row.repetitions > 1 for row in rows)
    since = ", from the end of the first iteration on"
    since *= all(rep.zero_s is None for _, rep, _ in run.records())
    notes = [f"Training loss, {hosts}{since}."]
    smoothed = any(not found.is_short for found in known)
    if smoothed:
        notes.append(f"Lines are trailing means of {SMOOTH} iterations; the faint line is not.")
    elif any(row.target_loss is not None for row in rows):
        notes.append(f"The target is reached by the mean of the last {SMOOTH} iterations.")
    counts = [len(record.losses) for _, _, record in run.records()]
    if max(counts, default=0) > MOST_POINTS:
        width = max(record.losses_of for _, _, record in run.records())
        means = f", each loss the mean of {width} iterations before smoothing" * (width > 1)
        notes.append(f"Long curves show {MOST_POINTS} points{means}.")
    if smoothed and any(found.smooth.low for found in known):
        notes.append("Bands are the lowest to the highest repetition.")
    if falling := [row.label for row in rows if row.falling]:
        notes.append(f"Still falling at the end: {', '.join(falling)}. A longer run ends lower.")
    if run.emulated:
        notes.append("Emulated compute: these losses say nothing about learning.")
    return notes


def _round_value(value: float) -> float | None:
    """Round to five significant digits. None, a gap in the line, if not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _select_points(items: list[int]) -> list[int]:
    """Return at most `MOST_POINTS` evenly spaced items, with the first and the last."""
    if len(items) <= MOST_POINTS:
        return items
    step = (len(items) - 1) / (MOST_POINTS - 1)
    return [items[round(i * step)] for i in range(MOST_POINTS)]
