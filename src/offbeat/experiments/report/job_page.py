"""HTML page of a job: that of a comparison with one contestant."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from offbeat.core import words
from offbeat.core.files import replace_text
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import COMPUTE, Trace, shift_span, spans_from_dict
from offbeat.core.transport.topology import Topology
from offbeat.core.words import count_text, duration, local_time
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run
from offbeat.experiments.report import values
from offbeat.experiments.report.breakdown import Parts, Split, parts_of
from offbeat.experiments.report.job import (
    JobReport,
    job_report,
    members_of,
    process_fact,
    total_of,
)
from offbeat.experiments.report.job_text import TITLES, rank_text, split_text
from offbeat.experiments.report.page import render as render_page
from offbeat.experiments.report.summary import Row
from offbeat.experiments.report.timeline import predicted_window
from offbeat.jobs.record_folder import PAGE_FILE
from offbeat.jobs.record_lines import JobRecord, RankLines, load

MOST_EVENTS = 40  # newest events that are listed
MOST_POINTS = 240  # points of the curve of the loss

Curve = tuple[tuple[int, float, float], ...]
"""Iteration, seconds since the start, and value of each point."""


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
    run = _as_run(record, report)
    own = {
        "kind": "job",
        "sentence": _sentence(report),
        "reservations": _reservations(report),
        "eyebrow": _eyebrow(report),
        "banners": _banners(report),
        "conditions": "Means over all ranks with lines, and over the iterations after the "
        "measurement of a profile.",
        "measured": _window_text(run),
        "facts": _facts(record, report),
        "tables": list(_tables(record, report)),
    }
    return render_page(run, [_row(record, report, run)], {}, own)


# --- the job as a run ----------------------------------------------------------------------------


def _as_run(record: JobRecord, report: JobReport) -> Run:
    """Return the job as a comparison of one strategy."""
    plan = _newest(record, "plan", Plan)
    ranks = list(_recorded_ranks(record, report.strategy, plan))
    losses = tuple(_losses(record, report.started_t))
    ranks = [replace(rank, losses=losses) for rank in ranks]
    ranks[0] = replace(ranks[0], metrics=_metrics(record, report.started_t))
    contestant = Contestant(
        report.strategy,
        report.strategy,
        {},
        (Repetition(0, tuple(ranks), zero_s=0.0),),
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
    return record.read_file(f"{newest}.json", kind.from_dict)


def _recorded_ranks(record: JobRecord, strategy: str, plan: Plan | None) -> Iterator[RankRecord]:
    """Yield the newest timeline that the first ranks have in common; rank 0 without one if there is
    none."""
    windows = list[Mapping[int, Mapping[str, Any]]]()
    for rank in range(record.world_size):
        lines = record.ranks.get(rank, RankLines()).spans
        own = {int(line["first"]): line for line in lines if "first" in line}
        if not own or (windows and not own.keys() & windows[0].keys()):
            break
        windows.append(own)
    nodes = Topology.from_record(record.run)
    notes = {} if nodes is None else nodes.record()
    common = set.intersection(*(set(own) for own in windows)) if windows else set()
    traces = [_trace_of(own, max(common or own), strategy, plan, notes) for own in windows]
    if not traces or None in traces:
        traces = [Trace("measured", strategy, ((),), (0.0,), notes=notes)]
    for rank, trace in enumerate(traces if common else traces[:1]):
        assert trace is not None
        yield RankRecord(rank, strategy, trace)


def _trace_of(
    windows: Mapping[int, Mapping[str, Any]],
    first: int,
    strategy: str,
    plan: Plan | None,
    notes: Mapping[str, Any],
) -> Trace | None:
    """Return the trace of the line with spans from iteration `first` on; None if it cannot be
    read."""
    try:
        spans = spans_from_dict(windows[first]["spans"])
    except (KeyError, TypeError, ValueError):
        return None
    own = [span for span in spans if span.lane == COMPUTE]
    if not own:
        return None
    # Spans have the numbers of the process, which do not count iterations before a checkpoint.
    shift = first - min(span.iteration for span in own)
    spans = tuple(shift_span(span, shift) for span in spans)
    count = max(span.iteration for span in own) + shift - first + 1
    ends_s = [
        max(s.end_s for s in own if s.iteration + shift == i) for i in range(first, first + count)
    ]
    start_s = min(s.start_s for s in own if s.iteration + shift == first)
    period = 1 if plan is None else plan.period
    ends, starts = (tuple(ends_s),), (start_s,)
    return Trace("measured", strategy, ends, starts, spans, first, min(period, count), notes)


def _losses(record: JobRecord, start_t: float) -> Iterator[tuple[int, float, float]]:
    """Yield iteration, seconds and loss of each interval of the first rank with losses: means over
    the ranks, whose intervals end at other times."""
    ranks = [lines.intervals for lines in record.ranks.values()]
    lossy = [[i for i in own if i.loss is not None and i.loss.n] for own in ranks]
    own = next(filter(None, lossy), [])
    width = max(1, -(-len(own) // MOST_POINTS))
    ends = [*own[width - 1 :: width], *(own[-1:] if len(own) % width else [])]
    stops, sums = [end.stop for end in ends], [[0.0, 0] for _ in ends]
    for interval in (i for intervals in lossy for i in intervals):
        assert interval.loss is not None
        cell = sums[min(bisect_left(stops, interval.stop), len(sums) - 1)]
        cell[0] += interval.loss.n * interval.loss.mean
        cell[1] += interval.loss.n
    for end, (total, n) in zip(ends, sums, strict=True):
        yield end.stop - 1, max(0.0, end.t - start_t), total / n


def _metrics(record: JobRecord, start_t: float) -> dict[str, Curve]:
    """Return each reported metric, of the first rank that reports it."""
    found: dict[str, Curve] = {}
    for _, lines in sorted(record.ranks.items()):
        own: dict[str, Curve] = {}
        for line in lines.metrics:
            point = line["iteration"], max(0.0, line["t"] - start_t), line["value"]
            own[line["name"]] = (*own.get(line["name"], ()), point)
        found = own | found
    return found


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
    metrics = run.contestants[0].repetitions[0].ranks[0].metrics
    return Row(
        report.strategy,
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
        metrics={name: points[-1][2] for name, points in metrics.items()},
        problem="no iteration has ended",
    )


def _message_s(record: JobRecord) -> float:
    """Return the seconds of messages per iteration at the rank that waits in them least."""
    totals = [total_of(lines) for lines in record.ranks.values()]
    return min((total.message_s for total in totals if total is not None), default=0.0)


# --- texts ---------------------------------------------------------------------------------------


def _sentence(report: JobReport) -> str:
    """Return the headline."""
    if report.iteration_s is None:
        return f"{report.strategy}: no iteration has ended."
    verb = "takes" if report.state == "running" else "took"
    text = f"{report.strategy} {verb} {words.seconds(report.iteration_s)} per iteration"
    if report.predicted_s is None:
        return f"{text}."
    return f"{text}, {report.mark}{words.seconds(report.predicted_s)} predicted."


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
    return texts


def _window_text(run: Run) -> str:
    """Return which iterations the timelines show."""
    trace = run.contestants[0].repetitions[0].trace
    if not trace.iterations:
        return "No timeline of single iterations was recorded."
    last = trace.first + trace.iterations - 1
    return f"The timeline is of iterations {trace.first:,} to {last:,}."


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
    """Yield the tables of ranks, of changes of the members, and of events."""
    yield values.record_table("ranks", list(_rank_rows(record)))
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
        yield values.record_table("changes of the members", rows)
    events = [
        {
            "iteration": f"{event.get('iteration', 0):,}",
            "event": event.get("event"),
            "": words.one_line(event.get("text")),
        }
        for event in report.events[-MOST_EVENTS:]
    ]
    if events:
        yield values.record_table("newest events", events)


def _rank_rows(record: JobRecord) -> Iterator[dict[str, Any]]:
    """Yield host, process, sums and end of each rank."""
    history = members_of(record)
    gone = {} if history is None else history.ended_members
    for rank in range(record.world_size):
        lines = record.ranks.get(rank)
        total = None if lines is None else total_of(lines)
        row: dict[str, Any] = {"rank": rank, "host": process_fact(record, "hosts", rank, "host")}
        row["process"] = process_fact(record, "pids", rank, "pid")
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
