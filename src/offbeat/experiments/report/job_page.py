"""HTML page of a job, from its record and those of the runs whose checkpoints it continued."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from offbeat.core.files import replace_text
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import COMPUTE, Trace, spans_from_dict
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run
from offbeat.experiments.report import words
from offbeat.experiments.report.bars import Bar, predicted_bar
from offbeat.experiments.report.breakdown import Parts, Split, parts_of
from offbeat.experiments.report.chart import Chart, Line
from offbeat.experiments.report.job import (
    TITLES,
    JobReport,
    earlier_records,
    events_of,
    job_report,
    members_of,
    rank_text,
    run_name,
    split_text,
    total_of,
)
from offbeat.experiments.report.page import Plot, render_view, shared_view
from offbeat.experiments.report.summary import Row
from offbeat.experiments.report.timeline import predicted_window
from offbeat.jobs.interval import Interval, combine, quantile
from offbeat.jobs.record_folder import PAGE_FILE
from offbeat.jobs.record_lines import JobRecord, RankLines, load
from offbeat.jobs.words import count_text, duration, local_time

MOST_STEPS = 240  # groups of intervals in a line of a chart
MOST_EVENTS = 40  # newest events that are marked and listed
MOST_PROCESSES = 16  # processes of a chart with a line for each
REPLAN = "replan"  # event of a plan for measured times
BAND = (0.05, 0.95)  # quantiles of the iterations of a group that the band covers
# Units of the time axis: name, seconds, and the number of units from which it is used.
UNITS = (("d", 86400.0, 3.0), ("h", 3600.0, 3.0), ("min", 60.0, 5.0))
UNIT_NAMES = {"s": "Seconds", "ms": "Milliseconds", "µs": "Microseconds"}
LABEL = "job"


def write(folders: Sequence[Path], now: float, output: Path | None = None) -> Path:
    """Write the page of a job's record and return its path.

    Args:
        folders: folders of one run, which hosts without a shared folder have written.
        now: seconds since 1970.
        output: file of the page; None for `PAGE_FILE` in the first folder.

    Raises:
        ValueError: the folders hold records of different runs, or of a newer version.
        OSError: the page cannot be written; names it.
    """
    record = load(folders)
    page = output or folders[0] / PAGE_FILE
    replace_text(page, render(record, now))
    return page


def render(record: JobRecord, now: float) -> str:
    """Return the page of a job as HTML. `now` is in seconds since 1970."""
    report = job_report(record, now)
    chain = [*reversed(list(earlier_records(record))), record]
    run = _as_run(record, report)
    row = _row(record, report, run)
    [contestant] = run.contestants
    bars = [(_measured_bar(report), predicted_bar(row))]
    shared = shared_view(run, [(row, contestant, report.strategy)], bars, {})
    start_t = min(job_report(one, now).started_t for one in chain)
    axis = TimeAxis.of(start_t, report.started_t + report.duration_s)
    return render_view(
        {
            **shared,
            "kind": "job",
            "sentence": _sentence(report),
            "reservations": _reservations(report),
            "eyebrow": _eyebrow(report),
            "banners": _banners(report),
            "early_plots": [_time_plot(chain, report, axis), *_members_plot(record, report, axis)],
            "plots": [_loss_plot(chain, axis), *_metric_plots(chain, axis)],
            "distance": Chart("", "s", ()),
            "conditions": "Means over all ranks with lines, and over the iterations after the "
            "measurement of a profile.",
            "reassurance": [],
            "measured": _window_text(run),
            "facts": _facts(record, report),
            "tables": list(_tables(record, report)),
            "failed": [],
        }
    )


# --- the job as a run ----------------------------------------------------------------------------


def _as_run(record: JobRecord, report: JobReport) -> Run:
    """Return the job as a comparison of one strategy, without losses."""
    plan = _newest(record, "plan", Plan)
    ranks = tuple(_recorded_ranks(record, report.strategy, plan))
    contestant = Contestant(
        LABEL,
        report.strategy,
        {},
        (Repetition(0, ranks),) if ranks else (),
        plan,
        _newest(record, "predicted", Trace),
    )
    argv = tuple(map(str, record.run.get("argv") or ()))
    started = datetime.fromtimestamp(report.started_t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Run(
        record.folders[0],
        (contestant,),
        command=argv,
        started=started,
        profile=_newest(record, "profile", Profile),
        problems=report.problems,
    )


def _newest(record: JobRecord, name: str, kind: Any) -> Any:
    """Return the newest plan, profile or prediction of a job; None if there is none or it cannot be
    read."""
    later = [
        path.stem
        for folder in record.folders
        for path in folder.glob(f"{name}-*.json")
        if path.stem.rpartition("-")[2].isdecimal()
    ]
    newest = max(later, key=lambda stem: int(stem.rpartition("-")[2]), default=name)
    return record.read_object(f"{newest}.json", kind.from_dict)


def _recorded_ranks(record: JobRecord, strategy: str, plan: Plan | None) -> Iterator[RankRecord]:
    """Yield the newest timeline that the first ranks have in common; nothing without rank 0's."""
    windows = list[Mapping[int, Mapping[str, Any]]]()
    for rank in range(record.world_size):
        lines = record.ranks.get(rank, RankLines())
        own = {line["first"]: line for line in lines.details if line.get("kind") == "spans"}
        if not own or (windows and not own.keys() & windows[0].keys()):
            break
        windows.append(own)
    nodes = Topology.from_record(record.run)
    notes = {} if nodes is None else nodes.record()
    common = set.intersection(*(set(own) for own in windows)) if windows else set()
    for rank, own in enumerate(windows if common else windows[:1]):
        first = max(common or own)
        trace = _trace_of(own[first], first, strategy, plan, notes)
        if trace is not None:
            yield RankRecord(rank, strategy, trace)


def _trace_of(
    line: Mapping[str, Any],
    first: int,
    strategy: str,
    plan: Plan | None,
    notes: Mapping[str, Any],
) -> Trace | None:
    """Return the trace of a line with spans; None if they cannot be read."""
    try:
        spans = spans_from_dict(line["spans"])
    except (KeyError, TypeError, ValueError):
        return None
    own = [span for span in spans if span.lane == COMPUTE]
    if not own:
        return None
    # Spans have the numbers of the process, which do not count iterations before a checkpoint.
    shift = first - min(span.iteration for span in own)
    spans = tuple(
        replace(
            span,
            iteration=span.iteration + shift,
            carries=span.carries and (span.carries[0] + shift, span.carries[1] + shift),
        )
        for span in spans
    )
    count = max(span.iteration for span in own) + shift - first + 1
    ends_s = [
        max(s.end_s for s in own if s.iteration + shift == i) for i in range(first, first + count)
    ]
    start_s = min(s.start_s for s in own if s.iteration + shift == first)
    period = 1 if plan is None else plan.period
    ends, starts = (tuple(ends_s),), (start_s,)
    return Trace("measured", strategy, ends, starts, spans, first, min(period, count), notes)


def _row(record: JobRecord, report: JobReport, run: Run) -> Row:
    measured_s, predicted_s = report.iteration_s, report.predicted_s
    window = predicted_window(run.contestants[0])
    expected = None if window is None else parts_of(window)
    split = None
    if expected is not None and measured_s is not None and predicted_s is not None:
        parts = Parts(
            (report.compute_s or 0.0) + (report.script_s or 0.0),
            report.messages_s or 0.0,
            report.late_s or 0.0,
            _message_s(record),
        )
        split = Split(expected, parts, measured_s - predicted_s)
    counted, sent = max(report.counted, 1), report.sent_bytes
    return Row(
        LABEL,
        report.strategy,
        repetitions=1,
        failed=0,
        iteration_s=measured_s,
        predicted_s=predicted_s,
        predicted_error=predicted_s / measured_s - 1 if predicted_s and measured_s else None,
        bound_s=report.bound_s,
        exposed_s=None if expected is None else expected.messages_s + expected.waiting_s,
        sent_bytes=None if sent is None else sent * fmean(report.nodes or [1]) / counted,
        final_loss=None if report.losses is None else report.losses[1],
        split=split,
        iterations=report.iterations,
        metrics={name: points[-1][1] for name, points in _metric_points(record).items()},
        problem="no iteration has ended",
    )


def _message_s(record: JobRecord) -> float:
    """Return the seconds of messages per iteration at the rank that waits in them least."""
    totals = [total_of(lines) for lines in record.ranks.values()]
    return min((total.message_s for total in totals if total is not None), default=0.0)


def _measured_bar(report: JobReport) -> Bar | None:
    if report.iteration_s is None:
        return None
    waits_s = (report.messages_s or 0.0) + (report.late_s or 0.0)
    return Bar(max(0.0, report.iteration_s - waits_s), waits_s)


# --- texts ---------------------------------------------------------------------------------------


def _sentence(report: JobReport) -> str:
    """Return the headline."""
    if report.iteration_s is None:
        return f"{report.strategy}: no iteration has ended."
    verb = "takes" if report.state == "running" else "took"
    text = f"{report.strategy} {verb} {words.seconds(report.iteration_s)} per iteration"
    if report.predicted_s is None:
        return f"{text}."
    return f"{text}, {words.seconds(report.predicted_s)} predicted."


def _reservations(report: JobReport) -> str:
    texts = [f"{split_text(report).capitalize()}."] if report.iteration_s is not None else []
    if report.state == "ended":
        texts.append(f"Ended {report.ending}.")
    return " ".join(texts)


def _eyebrow(report: JobReport) -> list[str]:
    done = count_text(report.iterations, "iteration")
    return [rank_text(report), f"{done} in {duration(report.duration_s)}"]


def _banners(report: JobReport) -> list[str]:
    """Return how the job ended, unless it ended by itself, and what it continued."""
    texts = []
    if report.state != "ended":
        title = TITLES[report.state].lower()
        texts.append(f"{title[:1].upper()}{title[1:]}: {report.ending}")
    if report.verdict is not None:
        texts.append(f"Verdict: {report.verdict}")
    return texts


def _window_text(run: Run) -> str:
    """Return which iterations the timelines show."""
    for rep in run.contestants[0].repetitions:
        trace = rep.trace
        last = trace.first + trace.iterations - 1
        return f"The timeline is of iterations {trace.first:,} to {last:,}."
    return "No timeline of single iterations was recorded."


def _facts(record: JobRecord, report: JobReport) -> dict[str, Any]:
    run = record.run
    links = run.get("links") or {}
    return {
        "record": ", ".join(map(str, record.folders)),
        "job name": run.get("job_name"),
        "launcher": run.get("launcher"),
        "started": local_time(report.started_t),
        "links": ", ".join(map(str, links.values())) or None,
        **(run.get("versions") or {}),
    }


def _tables(record: JobRecord, report: JobReport) -> Iterator[dict[str, Any]]:
    """Yield the tables of ranks, changes of the members, and plans for measured times."""
    yield words.record_table("ranks", list(_rank_rows(record)))
    if report.members is not None:
        rows = [
            {
                "epoch": change.get("epoch"),
                "iteration": f"{change.get('iteration', 0):,}",
                "members": ", ".join(map(str, change.get("members", ()))),
                **{
                    group: ", ".join(map(str, change.get(group, ()))) or None
                    for group in ("joined", "left", "failed")
                },
                "without progress": words.seconds(change.get("s")),
                "messages landed": change.get("landed"),
                "skipped": change.get("skipped"),
            }
            for change in report.members.changes
        ]
        yield words.record_table("changes of the members", rows)
    plans = [event for event in report.events if event.get("event") == REPLAN]
    if plans:
        rows = [
            {
                "iteration": f"{event.get('iteration', 0):,}",
                "why": str(event.get("text", "")),
                "predicted before": words.seconds(event.get("from_s")),
                "predicted after": words.seconds(event.get("to_s")),
            }
            for event in plans
        ]
        yield words.record_table("measured times and plans", rows)


def _rank_rows(record: JobRecord) -> Iterator[dict[str, Any]]:
    """Yield host, process, sums and end of each rank."""
    history = members_of(record)
    gone = {} if history is None else history.ended_members
    for rank in range(record.world_size):
        lines = record.ranks.get(rank)
        total = None if lines is None else total_of(lines)
        row: dict[str, Any] = {"rank": rank, "host": _of_rank(record, "hosts", rank, "host")}
        row["process"] = _of_rank(record, "pids", rank, "pid")
        if total is not None:
            sent = sum(link.bytes for link in total.links.values())
            row |= {
                "iterations": total.stop,
                "computes": words.seconds(total.own_s / total.n),
                "waits for messages": words.seconds(total.wait_s / total.n),
                "script": words.seconds(total.script_s / total.n),
                "sent": words.size(sent),
                "memory": words.size(total.rss_bytes),
            }
        end = None if lines is None else lines.end
        how = str((end or {}).get("how", gone.get(rank, "none")))
        row["end"] = "no lines" if lines is None else how
        yield row


def _of_rank(record: JobRecord, names: str, rank: int, name: str) -> Any:
    known = record.run.get(names) or []
    if rank < len(known):
        return known[rank]
    return record.ranks.get(rank, RankLines()).head.get(name)


# --- charts --------------------------------------------------------------------------------------


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


def _time_plot(chain: Sequence[JobRecord], report: JobReport, axis: TimeAxis) -> Plot:
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


def _members_plot(record: JobRecord, report: JobReport, axis: TimeAxis) -> Iterator[Plot]:
    """Yield the times of all members: a line per process, or the number of members if there are
    many processes."""
    history = report.members
    if history is None:
        return
    stop_t = report.started_t + report.duration_s
    lines = list[Line]()
    if len(history.presences) <= MOST_PROCESSES:
        for one in history.presences:
            host = _of_rank(record, "hosts", one.number, "host")
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


def _loss_plot(chain: Sequence[JobRecord], axis: TimeAxis) -> Plot:
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


def _metric_plots(chain: Sequence[JobRecord], axis: TimeAxis) -> Iterator[Plot]:
    """Yield a section for each metric that the script reports."""
    found = [_metric_points(record) for record in chain]
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


def _metric_points(record: JobRecord) -> dict[str, list[tuple[float, float, int]]]:
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
        if index:
            text = f"restarted as {run_name(record)}"
            found.append({"t": job_report(record, 0.0).started_t, "text": text, "place": ""})
        for event in events_of(record):
            if "continues" in event and index:
                found[-1]["place"] = f"iteration {event['iteration']:,}"
            else:
                iteration = int(event.get("iteration", 0))
                text = " ".join(str(event.get("text", "")).split())
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
