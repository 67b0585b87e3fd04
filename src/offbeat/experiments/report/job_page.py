"""HTML page of a job, from its record and those of the runs whose checkpoints it continued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from offbeat.core.files import replace_text
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import COMPUTE, Trace, shift_span, spans_from_dict
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run
from offbeat.experiments.report import words
from offbeat.experiments.report.bars import Bar, predicted_bar
from offbeat.experiments.report.breakdown import Parts, Split, parts_of
from offbeat.experiments.report.chart import Chart
from offbeat.experiments.report.job import (
    JobReport,
    earlier_records,
    job_report,
    members_of,
    process_fact,
    total_of,
)
from offbeat.experiments.report.job_charts import (
    TimeAxis,
    loss_plot,
    members_plot,
    metric_plots,
    metric_points,
    time_plot,
)
from offbeat.experiments.report.job_text import TITLES, rank_text, split_text
from offbeat.experiments.report.page import render_view, shared_view
from offbeat.experiments.report.summary import Row
from offbeat.experiments.report.timeline import predicted_window
from offbeat.jobs.record_folder import PAGE_FILE
from offbeat.jobs.record_lines import JobRecord, RankLines, load
from offbeat.jobs.words import count_text, duration, local_time

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
            "early_plots": [time_plot(chain, report, axis), *members_plot(record, report, axis)],
            "plots": [loss_plot(chain, axis), *metric_plots(chain, axis)],
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
    return record.read_file(f"{newest}.json", kind.from_dict)


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
    spans = tuple(shift_span(span, shift) for span in spans)
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
        metrics={name: points[-1][1] for name, points in metric_points(record).items()},
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
    """Yield the tables of ranks and of changes of the members."""
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
