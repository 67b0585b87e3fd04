"""Charts of a job against time: iterations, members, losses and reported metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offbeat.experiments.report import words
from offbeat.experiments.report.chart import Chart, Line
from offbeat.experiments.report.job import (
    JobReport,
    events_of,
    job_report,
    members_of,
    process_fact,
    run_name,
)
from offbeat.experiments.report.page import Plot
from offbeat.jobs.interval import Interval, combine, quantile
from offbeat.jobs.record_lines import JobRecord, RankLines

MOST_STEPS = 240  # groups of intervals in a line of a chart
MOST_EVENTS = 40  # newest events that are marked and listed
MOST_PROCESSES = 16  # processes of a chart with a line for each
BAND = (0.05, 0.95)  # quantiles of the iterations of a group that the band covers
# Units of the time axis: name, seconds, and the number of units from which it is used.
UNITS = (("d", 86400.0, 3.0), ("h", 3600.0, 3.0), ("min", 60.0, 5.0))
UNIT_NAMES = {"s": "Seconds", "ms": "Milliseconds", "µs": "Microseconds"}


@dataclass(frozen=True)
class TimeAxis:
    """Axis of the time since the start of the job's first run.

    Attributes:
        start_t: start in seconds since 1970.
        unit: unit of the axis.
        scale: seconds of the unit.
    """

    start_t: float
    unit: str
    scale: float

    @classmethod
    def of(cls, start_t: float, end_t: float) -> TimeAxis:
        """Return an axis for a duration, in the largest unit of which it has several."""
        for name, scale, least in UNITS:
            if end_t - start_t >= least * scale:
                return cls(start_t, name, scale)
        return cls(start_t, "s", 1.0)

    def at(self, t: float) -> float:
        """Return the place of a time in seconds since 1970."""
        return max(0.0, t - self.start_t) / self.scale


def time_plot(chain: Sequence[JobRecord], report: JobReport, axis: TimeAxis) -> Plot:
    """Return the seconds per iteration with the events and restarts of the job."""
    steps = [_steps(_own_lines(record), counted=True) for record in chain]
    unit = words.unit_for([group.mean_s for groups in steps for group in groups])
    lines = []
    for record, groups in zip(chain, steps, strict=True):
        xs, ys, low, high = list[float](), list[float](), list[float](), list[float]()
        for group in groups:
            for t in (_begin_t(group), group.t):
                xs.append(axis.at(t))
                ys.append(group.mean_s / unit.seconds)
                low.append(max(group.s_min, quantile(group.hist, BAND[0])) / unit.seconds)
                high.append(min(group.s_max, quantile(group.hist, BAND[1])) / unit.seconds)
        if xs:
            name, look = _name(record, chain, "measured")
            lines.append(Line(name, look, xs, ys, low, high))
    events = list(_events(chain))[-MOST_EVENTS:]
    predicted_s = report.predicted_s
    predicted = f"predicted {words.seconds(predicted_s)}"
    chart = Chart(
        f"Time per iteration in {unit.name} against {axis.unit}",
        axis.unit,
        lines,
        None if predicted_s is None else (predicted_s / unit.seconds, predicted),
        "zero",
        [(axis.at(event["t"]), str(event["number"])) for event in events],
    )
    notes = [
        "Means over intervals of rank 0, without the iterations that measured a profile. The band "
        "covers 90 % of the iterations."
    ]
    notes += ["Numbered lines are the events and restarts below."] * bool(events)
    missing = "No iteration was recorded."
    return Plot(f"{UNIT_NAMES[unit.name]} per iteration", chart, None, notes, (), events, missing)


def members_plot(record: JobRecord, report: JobReport, axis: TimeAxis) -> Iterator[Plot]:
    """Yield the times of all members: a line per process, or the number of members if there are
    many processes."""
    history = report.members
    if history is None:
        return
    stop_t = report.started_t + report.duration_s
    lines = list[Line]()
    if len(history.presences) <= MOST_PROCESSES:
        for one in history.presences:
            host = process_fact(record, "hosts", one.number, "host")
            end = stop_t if one.end_t is None else one.end_t
            xs = [axis.at(one.begin_t), axis.at(end)]
            look = "base" if one.end else "best"
            name = " ".join(filter(None, [f"{one.number}", str(host or ""), one.end]))
            lines.append(Line(name, look, xs, [float(one.number)] * 2))
        title = "Members by the numbers of their processes"
    else:
        counts = [*history.counts, (stop_t, len(history.members))]
        xs, ys = list[float](), list[float]()
        for (t, count), (next_t, _) in pairwise(counts):
            xs += [axis.at(t), axis.at(next_t)]
            ys += [float(count)] * 2
        lines.append(Line("members", "best", xs, ys))
        title = "Number of members"
    events = [
        {
            "number": number,
            "t": float(change["t"]),
            "text": str(change.get("text", "")),
            "place": f"iteration {change.get('iteration', 0):,}",
        }
        for number, change in enumerate(history.changes, 1)
    ][-MOST_EVENTS:]
    chart = Chart(
        f"{title} against {axis.unit}",
        axis.unit,
        lines,
        None,
        "all" if len(lines) > 1 else "zero",
        [(axis.at(event["t"]), str(event["number"])) for event in events],
    )
    notes = [
        f"Members: {history.describe()}. The time without progress is that of the member that "
        "waited longest. Numbered lines are the changes below."
    ]
    yield Plot("Members", chart, None, notes, (), events, "")


def loss_plot(chain: Sequence[JobRecord], axis: TimeAxis) -> Plot:
    lines: dict[str, list[Line]] = {"time": [], "iterations": []}
    nonfinite = 0
    for record in chain:
        points = list(_loss_points(record))
        everything = (i.loss for r in record.ranks.values() for i in r.intervals)
        nonfinite += sum(loss.nonfinite for loss in everything if loss is not None)
        name, look = _name(record, chain, "mean loss")
        for key, xs in (
            ("time", [axis.at(t) for t, _, _ in points]),
            ("iterations", [float(iteration) for _, _, iteration in points]),
        ):
            if points:
                lines[key].append(Line(name, look, xs, [loss for _, loss, _ in points]))
    notes = ["Mean over ranks and over the iterations of an interval."]
    if nonfinite:
        notes.append(f"Losses that are not finite are left out: {nonfinite:,}.")
    return Plot(
        "Loss",
        Chart(f"Training loss against {axis.unit}", axis.unit, lines["time"]),
        Chart("Training loss against iterations", "iterations", lines["iterations"]),
        notes,
    )


def metric_plots(chain: Sequence[JobRecord], axis: TimeAxis) -> Iterator[Plot]:
    """Yield a section for each metric that the script reports."""
    found = [metric_points(record) for record in chain]
    for metric in dict.fromkeys(name for points in found for name in points):
        times, iterations = list[Line](), list[Line]()
        for record, points in zip(chain, found, strict=True):
            if metric not in points:
                continue
            name, look = _name(record, chain, metric)
            ys = [value for _, value, _ in points[metric]]
            for lines, xs in (
                (times, [axis.at(t) for t, _, _ in points[metric]]),
                (iterations, [float(iteration + 1) for _, _, iteration in points[metric]]),
            ):
                hit = (xs[0], ys[0]) if len(xs) == 1 else None  # a line of one point is not seen
                lines.append(Line(name, look, xs, ys, hit=hit))
        yield Plot(
            metric,
            Chart(f"{metric} against {axis.unit}", axis.unit, times, None, "all"),
            Chart(f"{metric} against iterations", "iterations", iterations, None, "all"),
            ["Of the first rank that reports it, mean over an interval."],
        )


def _name(record: JobRecord, chain: Sequence[JobRecord], name: str) -> tuple[str, str]:
    """Return the name and the look of the line of a run."""
    return (name, "best") if record is chain[-1] else (run_name(record), "base")


def _own_lines(record: JobRecord) -> RankLines:
    """Return the lines of the first rank with intervals; of the rank with the most if members have
    changed."""
    ranks = [lines for _, lines in sorted(record.ranks.items()) if lines.intervals]
    if ranks and members_of(record) is not None:
        return max(ranks, key=lambda lines: len(lines.intervals))
    return next(iter(ranks), RankLines())


def _steps(lines: RankLines, *, counted: bool) -> list[Interval]:
    """Return the intervals, combined into at most `MOST_STEPS` groups.

    Args:
        lines: lines of a rank.
        counted: whether to leave out the measurement of a profile, if iterations follow it.
    """
    own = [i for i in lines.intervals if i.first >= lines.first or not counted] or lines.intervals
    width = max(1, -(-len(own) // MOST_STEPS))
    return [combine(own[k : k + width]) for k in range(0, len(own), width)]


def _begin_t(group: Interval) -> float:
    """Return the start of an interval in seconds since 1970."""
    return group.t - group.s_sum


def _loss_points(record: JobRecord) -> Iterator[tuple[float, float, int]]:
    """Yield time, mean loss and number of iterations of each group of intervals."""
    groups = _steps(_own_lines(record), counted=False)
    stops = [group.stop for group in groups]
    sums = [[0.0, 0] for _ in groups]
    for lines in record.ranks.values():
        for interval in lines.intervals:
            place = bisect_left(stops, interval.stop)
            if interval.loss is not None and interval.loss.n and groups:
                cell = sums[min(place, len(sums) - 1)]
                cell[0] += interval.loss.n * interval.loss.mean
                cell[1] += interval.loss.n
    known = [(group, total / n) for group, (total, n) in zip(groups, sums, strict=True) if n]
    if len(known) == 1:  # a line has two ends
        group, loss = known[0]
        yield _begin_t(group), loss, group.first
    yield from ((group.t, loss, group.stop) for group, loss in known)


def metric_points(record: JobRecord) -> dict[str, list[tuple[float, float, int]]]:
    """Return time, value and iteration of each reported metric, of the first rank that reports
    it."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for _, lines in sorted(record.ranks.items()):
        own: dict[str, list[tuple[float, float, int]]] = {}
        for line in lines.metrics:
            place = own.setdefault(str(line["name"]), [])
            place.append((line["t"], line["value"], line["iteration"]))
        found = own | found
    return found


def _events(chain: Sequence[JobRecord]) -> Iterator[dict[str, Any]]:
    """Yield the events and restarts of all runs in order, each with number, text, place and
    time."""
    found = list[dict[str, Any]]()
    for index, record in enumerate(chain):
        lines = _own_lines(record)
        restart: dict[str, Any] | None = None
        if index:
            text = f"restarted as {run_name(record)}"
            restart = {"t": job_report(record, 0.0).started_t, "text": text, "place": ""}
            found.append(restart)
        for event in events_of(record):
            if "continues" in event and restart is not None:
                restart["place"] = f"iteration {event['iteration']:,}"
            else:
                iteration = int(event.get("iteration", 0))
                text = words.one_line(event.get("text"))
                t = _time_of(lines, iteration, float(event["t"]))
                found.append({"t": t, "text": text, "place": f"iteration {iteration:,}"})
    for number, event in enumerate(found, 1):
        yield {"number": number, **event}


def _time_of(lines: RankLines, iteration: int, default_t: float) -> float:
    """Return the time at which an iteration began; `default_t` if it is in no interval."""
    for interval in lines.intervals:
        if interval.first <= iteration < interval.stop:
            share = (iteration - interval.first) / interval.n
            return _begin_t(interval) + share * interval.s_sum
    return default_t
