"""Verdict of `offbeat advise` that is kept with a comparison, beside its measurements."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.experiments.record.run_directory import Run
from offbeat.experiments.report.summary import Row
from offbeat.jobs.verdict_file import verdict_of_run


def verdict_texts(run: Run, rows: Sequence[Row]) -> list[str]:
    """Return the advice, and what the verdict predicts for each strategy beside its measurement;
    empty without a verdict."""
    kept = verdict_of_run(run.path)
    if kept is None:
        return []
    hosts, texts = int(run.cluster.get("hosts", 0)), [kept.advice]
    for row in rows:
        to_loss_s = row.target_s if kept.has_target(row.target_loss) else None
        parts = kept.parts(row.strategy, hosts, row.iteration_s, to_loss_s)
        if parts:
            has_name = len(rows) == 1 or parts[0].startswith(row.strategy)
            texts.append("; ".join(parts) if has_name else f"{row.label}: {'; '.join(parts)}")
    return texts
