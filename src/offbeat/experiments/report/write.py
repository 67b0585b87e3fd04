"""Writer of the report of a run directory: summary.json, Chrome traces, report.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.core.files import replace_text
from offbeat.core.sim.trace import COMPUTE, Trace
from offbeat.experiments.device_speed import Compute
from offbeat.experiments.record.run_directory import SCHEMA, Contestant, Run, load
from offbeat.experiments.report import gossip, metrics, values
from offbeat.experiments.report.headline import headline
from offbeat.experiments.report.page import render
from offbeat.experiments.report.summary import Row, shift_curve, summarize

REPORT = "report.html"
SUMMARY = "summary.json"
MEASURED_TRACE = "trace.chrome.json"
PREDICTED_TRACE = "predicted.chrome.json"


def write(run_dir: str | Path) -> Path:
    """Write the report into a run directory.

    Args:
        run_dir: run directory with run.json and records.

    Returns:
        Path of report.html.

    Raises:
        ValueError: run.json is missing or unreadable.
    """
    run = load(run_dir)
    rows = summarize(run)
    replace_text(run.path / SUMMARY, values.dumps(summary(run, rows)))
    traces = {c.label: _write_traces(run.path / c.label, c) for c in run.contestants}
    report = run.path / REPORT
    replace_text(report, render(run, rows, traces))
    return report


def summary(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the contents of summary.json."""
    found = headline(run, rows)
    return {
        "schema": SCHEMA,
        "winner": None if found.best is None else found.best.label,
        "sentence": found.sentence,
        "reservations": list(found.reservations),
        "emulated": run.emulated,
        "profile": run.given,
        "profile_disturbed": run.profile_disturbed and asdict(run.profile_disturbed),
        "notes": list(run.notes),
        "seeds": list(run.seeds),
        "compute": _compute_record(run),
        "rows": [asdict(row) for row in rows],
        "problems": run.failures(),
        "curves": {c.label: _metric_curves(c) for c in run.contestants},
    }


def _metric_curves(contestant: Contestant) -> list[dict[str, Any]]:
    """Return the curves of the reported metrics in each counted repetition."""
    return [
        {
            name: metrics.as_columns(shift_curve(rep, metrics.metric_curve(rep, name)))
            for name in metrics.metric_names([rep])
        }
        for rep in contestant.complete
    ]


def _compute_record(run: Run) -> dict[str, Any] | None:
    """Return the device and pace of the measured compute, and the user's device if given."""
    if run.profile is None:
        return None
    return {**Compute.of(run.profile).record(), "device": run.device}


def _write_traces(folder: Path, contestant: Contestant) -> dict[str, str]:
    """Write the Chrome traces of a contestant; return their file names by source."""
    found = []
    if contestant.complete:
        rep = contestant.complete[0]
        ahead_s = gossip.clock_differences_s(rep)
        measured = rep.trace, gossip.measured_gossip(rep), ahead_s
        found.append(("measured", MEASURED_TRACE, *measured))
    if (trace := contestant.predicted) is not None:
        found.append(("predicted", PREDICTED_TRACE, trace, gossip.predicted_gossip(trace), None))
    for _, name, trace, gossiped, ahead_s in found:
        data = chrome_events(trace)
        if gossiped is not None:
            data["traceEvents"] += gossip.trace_events(gossiped, ahead_s)
        replace_text(folder / name, values.dumps(data))
    return {source: name for source, name, *_ in found}


def chrome_events(trace: Trace) -> dict[str, Any]:
    """Return Chrome trace events (for Perfetto): a process per rank, a thread per lane."""
    lanes = list(dict.fromkeys([COMPUTE, *(span.lane for span in trace.spans)]))
    events: list[dict[str, Any]] = []
    for rank in range(trace.world_size):
        label = f"rank {rank} ({trace.strategy}, {trace.source})"
        events.append(_meta("process_name", rank, 0, label))
        events += [_meta("thread_name", rank, i, lane) for i, lane in enumerate(lanes)]
    for span in trace.spans:
        carries = {} if span.carries is None else {"carries": list(range(*span.carries))}
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "pid": span.rank,
                "tid": lanes.index(span.lane),
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"iteration": span.iteration, "bytes": span.bytes, **carries},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
