"""Run directories of a few numbers, for figures that are computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.core.sim.trace import Span, Trace
from offbeat.experiments.record.record_file import RecordWriter, path_of


def record(
    rank: int,
    ends_s: Sequence[float],
    losses: Iterable[float] = (),
    *,
    spans: Sequence[Span] = (),
    period: int = 1,
    **fields: Any,
) -> dict[str, Any]:
    """What one rank writes; the loss of iteration i is known at its end."""
    trace = Trace("measured", "x", (tuple(ends_s),), (0.0,), tuple(spans), period=period)
    return {
        "rank": rank,
        "strategy": "x(period=1)",
        "observed": 0,
        "emulated": False,
        "losses": [[i, ends_s[i], loss] for i, loss in enumerate(losses)],
        "bytes": {},
        "trace": trace.to_dict(),
        "warnings": [],
        **fields,
    }


def write_tiny(
    path: Path,
    records: Mapping[str, Sequence[Sequence[dict[str, Any]]]],
    *,
    strategies: Mapping[str, str] | None = None,
    **run: Any,
) -> Path:
    """Write `records[label][repetition][rank]`; a label's strategy is its name by default."""
    path.mkdir(parents=True, exist_ok=True)
    contestants = [
        {"label": label, "strategy": (strategies or {}).get(label, label), "settings": {}}
        for label in records
    ]
    most = max((len(reps) for reps in records.values()), default=1)
    head = {"schema": 1, "lab": "netns", "contestants": contestants, "repetitions": most}
    dump(path / "run.json", {**head, "skip": 0, **run})
    for label, reps in records.items():
        for i, ranks in enumerate(reps):
            for data in ranks:
                write_record(path / label / f"rep{i}", data)
    return path


def write_record(folder: Path, data: Mapping[str, Any]) -> None:
    """Write a result of `record`, or of the reader of records, as one block. `cut`: not closed."""
    trace = data["trace"]
    block = {name: value for name, value in data.items() if name not in ("trace", "cut")}
    block |= {name: trace[name] for name in ("spans", "period", "uneven", "notes")}
    block |= {"first": 0, "ends_s": trace["ends_s"][0], "closed": not data.get("cut")}
    block["losses"] = [[i, loss] for i, _, loss in data.get("losses", ())]
    block["metrics"] = {
        name: [[i, value] for i, _, value in values]
        for name, values in data.get("metrics", {}).items()
    }
    RecordWriter(path_of(folder, data["rank"])).append(block)


def dump(path: Path, data: Any) -> None:
    """Write JSON, and the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def steady(seconds: float, count: int) -> list[float]:
    """Ends of `count` iterations of equal length."""
    return [seconds * (i + 1) for i in range(count)]
