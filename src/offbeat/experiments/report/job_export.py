"""Export of a job: the intervals of all ranks as CSV or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from offbeat.experiments.report import words
from offbeat.experiments.report.export import as_csv
from offbeat.experiments.report.job import earlier_records, run_name
from offbeat.jobs.interval import Interval
from offbeat.jobs.record_lines import JobRecord, RankLines, load

Form = Literal["csv", "json"]


def export(folders: Sequence[Path], form: Form) -> str:
    """Return the intervals of a job and of the runs that it continued, the earliest run first.

    Args:
        folders: folders of one run, which hosts without a shared folder have written.
        form: "csv" for a line per interval with a title, "json" for a list of objects.

    Raises:
        ValueError: the folders hold records of different runs, or of a newer version.
    """
    record = load(folders)
    chain = [*reversed(list(earlier_records(record))), record]
    rows = [row for one in chain for row in _rows(one)]
    return as_csv(rows) if form == "csv" else words.dumps(rows) + "\n"


def _rows(record: JobRecord) -> Iterator[dict[str, Any]]:
    for rank, lines in sorted(record.ranks.items()):
        for interval in lines.intervals:
            yield {"run": run_name(record), "rank": rank, **_numbers(interval, lines)}


def _numbers(interval: Interval, lines: RankLines) -> dict[str, Any]:
    """Return the numbers of an interval. Seconds and bytes are per iteration; an unknown number is
    None."""
    n, loss = interval.n, interval.loss
    last = interval.stop - 1
    metrics = {m["name"]: m["value"] for m in lines.metrics if m["iteration"] == last}
    return {
        "t": interval.t,
        "first_iteration": interval.first,
        "iterations": n,
        "measures_profile": interval.first < lines.first,
        "iteration_s": interval.mean_s,
        "least_iteration_s": interval.s_min,
        "most_iteration_s": interval.s_max,
        "computes_s": interval.own_s / n,
        "waits_s": interval.wait_s / n,
        "script_s": interval.script_s / n,
        "message_s": interval.message_s,
        "messages": sum(link.messages for link in interval.links.values()) / n,
        "sent_bytes": sum(link.bytes for link in interval.links.values()) / n,
        "updates": interval.updates,
        "loss": loss.mean if loss is not None and loss.n else None,
        "losses_not_finite": None if loss is None else loss.nonfinite,
        "resident_bytes": interval.rss_bytes,
        "device_bytes": interval.device_bytes,
        **{f"metric_{name}": value for name, value in metrics.items()},
    }
