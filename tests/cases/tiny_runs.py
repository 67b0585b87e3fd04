"""Run directories of a few numbers, for figures that are computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from offbeat.core.sim.trace import Span, Trace
from offbeat.experiments.record.run_directory import load_rank
from offbeat.jobs.record_lines import LineWriter, rank_file


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
    """Write a result of `record` or `data_of` as the lines of a rank. `cut`: without an end."""
    trace = data["trace"]
    writer = LineWriter(folder, data["rank"])
    writer.line("head", rank=data["rank"])
    for kind in ("decision", "warning"):
        for event in data.get(f"{kind}s", ()):
            iteration, text = (0, event) if isinstance(event, str) else event
            writer.line("event", event=kind, iteration=iteration, text=text)
    writer.line(
        "spans", spans=trace["spans"], notes=trace.get("notes", {}), sample=data.get("sample")
    )
    writer.line(
        "iterations",
        first=0,
        strategy=data["strategy"],
        observed=data["observed"],
        emulated=data["emulated"],
        period=trace["period"],
        uneven=trace["uneven"],
        ends_s=trace["ends_s"][0],
        losses=[[i, loss] for i, _, loss in data.get("losses", ())],
        without_update=list(data.get("without_update", ())),
        votes=data.get("votes", {}),
        metrics={
            name: [[i, value] for i, _, value in values]
            for name, values in data.get("metrics", {}).items()
        },
    )
    if not data.get("cut"):
        writer.line("end", how="ended", bytes=data.get("bytes"), pace=data.get("pace"))


def data_of(folder: str | Path, rank: int) -> dict[str, Any]:
    """What one rank has written, in the form of `record`."""
    found = load_rank(rank_file(Path(folder), rank))
    data = {field.name: getattr(found, field.name) for field in fields(found)}
    return {**data, "trace": found.trace.to_dict(), "bytes": data.pop("sent_bytes")}


def dump(path: Path, data: Any) -> None:
    """Write JSON, and the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def steady(seconds: float, count: int) -> list[float]:
    """Ends of `count` iterations of equal length."""
    return [seconds * (i + 1) for i in range(count)]
