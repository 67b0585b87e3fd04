"""Run directories of every kind that the report distinguishes."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cases.synthetic_runs import NEAR_AND_FAR, late, profile, three, write_run
from cases.tiny_runs import dump, record, steady, write_tiny
from offbeat import A2CiD2, sim
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.profile import Bucket, Link, Profile

# ---- gossip ------------------------------------------------------------------------------------

Row = tuple[int, int, float, float, int]  # partner, number, begin, end, bytes


def gossiped(
    rank: int,
    ends_s: Sequence[float],
    rows: Sequence[Row],
    *,
    origin_s: float = 0.0,
    counts: Mapping[int, int] | None = None,
    numbers: Sequence[float] = (),
) -> dict[str, Any]:
    """What a worker of gossip writes; `numbers`: its only parameter after every iteration."""
    if counts is None:
        peers = [row[0] for row in rows]
        counts = {peer: peers.count(peer) for peer in peers}
    exchanges = {str(peer): count for peer, count in counts.items()}
    sample = {
        "iterations": [*range(len(numbers))],
        "weight": 1.0,
        "numbers": base64.b64encode(np.array(numbers, dtype="<f8").tobytes()).decode(),
    }
    data = record(rank, ends_s, strategy="a2cid2", sample=sample if len(numbers) else None)
    data["trace"]["notes"] = {
        "gossip": {"exchanges": exchanges, "origin_s": origin_s, "last": rows}
    }
    return data


# Three workers with a gradient each second; the clock of worker 1 began 100 s later, that of
# worker 2 half a second earlier than that of worker 0. Exchanges at 2.25 (0, 1) and 3.5 (1, 2).
THREE = [
    gossiped(0, [1, 2, 3, 4], [(1, 1, 2.25, 2.75, 400)]),
    gossiped(
        1,
        [-99, -98, -97, -96],
        [(0, 1, -97.75, -97.25, 400), (2, 1, -96.5, -96.25, 400)],
        origin_s=100.0,
    ),
    gossiped(2, [1.5, 2.5, 3.5, 4.5], [(1, 1, 4.0, 4.25, 400)], origin_s=-0.5),
]


def gossip_run(path: Path) -> Path:
    write_tiny(path, {"a2cid2": [THREE]})
    sim.predict(A2CiD2(rate=0.5), profile(2, 3)).trace.save(path / "a2cid2" / "predicted.json")
    return path


# ---- votes -------------------------------------------------------------------------------------

VOTES = {
    "iterations": [0, 1, 2, 3, 4],
    "sent_bytes": [100, 0, 100, 0, 0],
    "spared_bytes": [0, 100, 0, 100, 100],
    "by_vote": {
        "sync": {
            "norm": [2.0, 2.1, math.nan, 0.0, 2.0],
            "change": [0.0] * 5,
            "yes": [[0, 1], [], [1], [], None],
        }
    },
}


def voting_run(path: Path) -> Path:
    """Two ranks: iterations of 3 s with an average, else of 1 s; and a strategy without votes."""
    ranks = []
    for rank in range(2):
        losses = [2.0, 1.9, 1.8, 1.7, 1.6]
        data = record(rank, [3.0, 4.0, 7.0, 8.0, 9.0], losses, votes=VOTES)
        ranks.append({**data, "trace": {**data["trace"], "uneven": True}})
    plain = [record(0, steady(1.0, 5), [2.0] * 5)]
    return write_tiny(path, {"selsync": [ranks], "ddp": [plain]})


# ---- replicas of several ranks -----------------------------------------------------------------

NODES = {"nodes": [[0, 1], [2, 3]], "sharded": False}


def spans_of_nodes(rank: int, iterations: int = 4) -> list[Span]:
    """Compute for .5 s, a message inside that begins later in the second node, one between."""
    late_s = 0.1 * (rank // 2)
    return [
        span
        for i in range(iterations)
        for span in (
            Span(rank, COMPUTE, "forward", i, i, i + 0.5),
            Span(rank, "inside", "grad", i, i + 0.5 + late_s, i + 0.7 + late_s, (0, 1), 100),
            Span(rank, "net", "param", i, i + 0.8, i + 1.0, (0, 1), 50),
        )
    ]


def nodes_run(path: Path, *, messages: bool = True) -> Path:
    sent = {"net": 200, "inside": 400}
    ranks = []
    for rank in range(4):
        spans = spans_of_nodes(rank) if messages else ()
        data = record(rank, steady(1.0, 4), [2.0, 1.5, 1.2, 1.0], spans=spans, bytes=sent)
        data["trace"]["notes"] = NODES
        ranks.append(data)
    links = [{"name": "net", "rate": "100mbit", "latency": None}]
    cluster = {"hosts": 2, "ranks": 2, "inside": "10gbit", "links": links}
    write_tiny(path, {"a": [ranks]}, cluster=cluster)
    link, inside = Link("net", 0.0, 1000.0), Link("inside", 0.0, 1000.0)
    facts = Profile((Bucket("b", 0.3, 0.4, 100),), (link,), 2, topology=(2, 2), inside=inside)
    facts.save(path / "profile.json")
    predicted = Trace("simulated", "x", ((1.0, 2.0),), (0.0,), tuple(spans_of_nodes(0, 2)))
    dump(path / "a/predicted.json", predicted.to_dict())
    return path


# ---- trouble -----------------------------------------------------------------------------------


def troubled_run(path: Path) -> Path:
    """Disturbed, failed, cut short, rising, diverged and missing repetitions; and a metric."""

    def trained(seconds: float, slope: float, accuracy: float = 0.5, **more: Any) -> Any:
        ends = steady(seconds, 40)
        points = [[i, ends[i], accuracy * (i + 1) / 40] for i in (9, 19, 29, 39)]
        losses = [3.0 + slope * i / 40 for i in range(40)]
        return record(0, ends, losses, metrics={"top_1%": points}, **more)

    broken = trained(0.7, -1.0)
    broken["losses"][-1][2] = None
    reps = {
        "ddp": [[trained(1.0, -1.0)], [trained(1.2, -1.2, 0.7)]],
        "bsp_2": [[trained(0.9, -0.8)]],
        "rising": [[trained(0.5, 1.0)]],
        "diverged": [[broken]],
        "cut": [[trained(0.8, -1.0, cut="ends after 40 iterations")]],
        "gone": [],
    }
    write_tiny(path, reps, target_loss=2.5)
    dump(path / "ddp/rep0/load.json", {"disturbed": 1.0, "foreign": 0.6})
    (path / "bsp_2/rep1").mkdir()
    (path / "bsp_2/rep1/rank0.log").write_text("Traceback\n")
    return path


def synthetic(*arguments: Any, of: Any = three, **more: Any) -> Callable[[Path], Path]:
    """Return a writer of a synthetic run; arguments are those of its profile."""
    facts = profile(*arguments)
    return lambda path: write_run(path, facts, of(facts), **more)


RUNS: dict[str, Callable[[Path], Path]] = {
    "typical": synthetic(iterations=60),
    "late": synthetic(6, 2, NEAR_AND_FAR, of=late, iterations=24, recorded=20),
    "many": synthetic(4, 9, iterations=12, recorded=10, repetitions=1),
    "emulated": synthetic(
        6, 2, iterations=12, recorded=11, repetitions=1, emulated=True, lab="none", note="Loopback."
    ),
    "gossip": gossip_run,
    "votes": voting_run,
    "nodes": nodes_run,
    "troubled": troubled_run,
}
