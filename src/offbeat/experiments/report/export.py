"""Export of a comparison: the numbers of each repetition as CSV or JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

from offbeat.experiments.record.run_directory import Run
from offbeat.experiments.report import values
from offbeat.experiments.report.headline import typed_text
from offbeat.experiments.report.summary import Row, repetition_rows


def export(run: Run, form: str) -> str:
    """Return the numbers of a run as "csv" or "json".

    CSV has a line per repetition after a title line; unknown numbers are empty.
    """
    records = [_record(index, row) for index, row in repetition_rows(run)]
    if form == "json":
        return values.dumps(records) + "\n"
    columns = dict.fromkeys(name for record in records for name in record)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(index: int, row: Row) -> dict[str, Any]:
    parts = None if row.split is None else row.split.measured
    state = "not run" if row.not_run else "failed" if row.problem else "measured"
    return {
        "strategy": typed_text(row),
        "repetition": index,
        "seed": next(iter(row.seeds), None),
        "state": "cut short" if row.cut else state,
        "disturbed": bool(row.disturbed),
        "iterations": row.iterations or None,
        "iteration_s": row.iteration_s,
        "computes_s": parts and parts.compute_s,
        "waits_for_messages_s": parts and parts.messages_s,
        "waits_for_hosts_s": parts and parts.waiting_s,
        "parts_estimated": row.split and row.split.estimated,
        "updates_per_s": row.updates_per_s,
        "predicted_iteration_s": row.predicted_s,
        "bound_iteration_s": row.bound_s,
        "sent_bytes_per_iteration": row.sent_bytes,
        "target": row.goal,
        "to_target_s": row.target_s,
        "to_target_iterations": row.target_iterations,
        "final_loss": row.final_loss,
        **{f"final_{name}": value for name, value in row.metrics.items()},
        "problem": row.problem or None,
    }
