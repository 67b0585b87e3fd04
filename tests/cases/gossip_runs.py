"""Records of a few workers that have gossiped, by hand."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import RankRecord, Repetition

Row = tuple[int, int, float, float, int]  # partner, number, begin, end, bytes


def record(
    rank: int,
    ends_s: Sequence[float],
    rows: Sequence[Row],
    *,
    origin_s: float = 0.0,
    counts: Mapping[int, int] | None = None,
    numbers: Sequence[float] = (),
) -> dict[str, Any]:
    """What a rank writes; `numbers`: the only parameter after every iteration."""
    if counts is None:
        peers = [row[0] for row in rows]
        counts = {peer: peers.count(peer) for peer in peers}
    exchanges = {str(peer): count for peer, count in counts.items()}
    gossip = {"exchanges": exchanges, "origin_s": origin_s, "last": rows}
    trace = Trace("measured", "x", (tuple(ends_s),), (0.0,), notes={"gossip": gossip})
    sample = {
        "iterations": [*range(len(numbers))],
        "weight": 1.0,
        "numbers": base64.b64encode(np.array(numbers, dtype="<f8").tobytes()).decode(),
    }
    return {
        "schema": 1,
        "rank": rank,
        "strategy": "a2cid2",
        "observed": 0,
        "losses": [],
        "trace": trace.to_dict(),
        "sample": sample if len(numbers) else None,
    }


def repetition(records: Sequence[Mapping[str, Any]]) -> Repetition:
    """As the report reads them."""
    return Repetition(
        0,
        tuple(
            RankRecord(r["rank"], "x", Trace.from_dict(r["trace"]), sample=r["sample"])
            for r in records
        ),
    )


# Three workers with a gradient each second; the clock of worker 1 began 100 s later, that of
# worker 2 half a second earlier than that of worker 0. Exchanges at 2.25 (0, 1) and 3.5 (1, 2).
THREE = [
    record(0, [1, 2, 3, 4], [(1, 1, 2.25, 2.75, 400)]),
    record(
        1,
        [-99, -98, -97, -96],
        [(0, 1, -97.75, -97.25, 400), (2, 1, -96.5, -96.25, 400)],
        origin_s=100.0,
    ),
    record(2, [1.5, 2.5, 3.5, 4.5], [(1, 1, 4.0, 4.25, 400)], origin_s=-0.5),
]
