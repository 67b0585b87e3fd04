"""Records of a rehearsal in the files of a comparison: losses of replicas, simulated times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbeat.core.files import write_text
from offbeat.core.sim.trace import spans_to_dict
from offbeat.experiments.record.record_file import RecordWriter, path_of
from offbeat.rehearsal.clock import Clock
from offbeat.rehearsal.job import Run
from offbeat.rehearsal.replica import ReplicaLog


def write_records(
    run: Run, clock: Clock, strategy: str, contestant: Path, repetition: Path
) -> None:
    """Write the record of every replica, the executed plan and its prediction.

    Args:
        run: result of the rehearsal.
        clock: simulated times of the run.
        strategy: strategy with its settings.
        contestant: folder of the strategy.
        repetition: folder of the repetition.
    """
    plan = run.courses[-1].plan
    for folder in (contestant, repetition):
        write_text(folder / "plan.json", json.dumps(plan.to_dict()))
    clock.prediction.trace.save(contestant / "predicted.json")
    common = {
        "first": 0,
        "strategy": strategy,
        "observed": 0,
        "emulated": False,
        "period": plan.period,
        "uneven": clock.trace.uneven,
        "sample": None,
        "pace": None,
        "closed": True,
    }
    for rank, log in enumerate(run.logs):
        ends_s = clock.ends_of(rank)
        block = {
            **common,
            "rank": rank,
            "ends_s": [round(end_s, 7) for end_s in ends_s],
            "spans": spans_to_dict(clock.spans_of(rank)),
            "notes": {**clock.trace.notes, **log.notes},
            **_fields_of(log, len(ends_s)),
        }
        RecordWriter(path_of(repetition, rank)).append(block)


def _fields_of(log: ReplicaLog, iterations: int) -> dict[str, Any]:
    """Return the fields of a record that the training of a replica determines."""
    return {
        "losses": [
            [i, float(f"{loss:.9g}")]
            for i, loss in enumerate(log.losses[:iterations])
            if loss is not None
        ],
        "without_update": log.without_update,
        "warnings": log.warnings,
        "decisions": [{"iteration": i, "what": what} for i, what in log.decisions],
        "votes": log.votes,
        "metrics": {
            name: [[i, value] for i, value in values if i < iterations]
            for name, values in log.metrics.items()
        },
        "bytes": log.sent_bytes,
    }
