"""Run directories of a few numbers, for figures that are computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.core.sim.trace import Span, Trace


def record(
    rank: int,
    ends_s: Sequence[float],
    losses: Iterable[float] = (),
    *,
    spans: Sequence[Span] = (),
    period: int = 1,
    start_s: float = 0.0,
    **fields: Any,
) -> dict[str, Any]:
    """What one rank writes; the loss of iteration i is known at its end."""
    trace = Trace("measured", "x", (tuple(ends_s),), (start_s,), tuple(spans), period=period)
    return {
        "schema": 1,
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
                dump(path / label / f"rep{i}" / f"rank{data['rank']}.json", data)
    return path


def dump(path: Path, data: Any) -> None:
    """Write JSON, and the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def steady(seconds: float, count: int) -> list[float]:
    """Ends of `count` iterations of equal length."""
    return [seconds * (i + 1) for i in range(count)]
