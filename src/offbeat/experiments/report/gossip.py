"""Gossip as data for the page: gradients and exchanges of some time, and who met whom how often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition

SHOWN = 10  # units of time, a gradient's mean over workers
MOST_WORKERS = 64  # of which lanes and counts are shown
EXCHANGES = 1000  # thread of a Chrome trace, below all others

Span = tuple[float, float]  # start and end in seconds


class Exchange(NamedTuple):
    """What workers i < j each did, on the common clock; of one whose word is missing, the other's.
    `bytes` went in each direction."""

    i: int
    j: int
    at_i: Span
    at_j: Span
    bytes: int


@dataclass(frozen=True)
class GossipTrace:
    """All that is known of some workers' gossip, in seconds of the first worker's trace.

    `counts[i][j]`: how often i and j have exchanged, of which `exchanges` are the last. Of workers
    without `gradients` only what their partners say is known.
    `since_s`, `until_s`: between these no exchange is missing.
    """

    gradients: Mapping[int, Sequence[Span]]
    exchanges: Sequence[Exchange]
    counts: Sequence[Sequence[int]]
    since_s: float = 0.0
    until_s: float = math.inf

    @property
    def unit_s(self) -> float:
        """The mean over workers of a gradient's time."""
        lengths = [[end - start for start, end in own] for own in self.gradients.values() if own]
        return fmean(map(median, lengths)) if lengths else 0.0

    @property
    def window_s(self) -> Span:
        """The last units in which all workers still computed."""
        end_s = min((own[-1][1] for own in self.gradients.values() if own), default=0.0)
        end_s = min(end_s, self.until_s)
        return min(end_s, max(self.since_s, end_s - SHOWN * self.unit_s)), end_s


def draw(contestant: Contestant) -> dict[str, Any] | None:
    """JSON-ready: what was predicted and measured of gossip; None of anything else."""
    found = next((of for rep in contestant.complete if (of := measured_gossip(rep))), None)
    trace = contestant.predicted
    expected = predicted_gossip(trace) if trace else None
    if found is None and expected is None:
        return None
    return {"predicted": expected and pack(expected), "measured": found and pack(found)}


def clock_differences_s(rep: Repetition) -> dict[int, float] | None:
    """What to add to each rank's seconds to have the first one's; None if clocks were not
    compared."""
    told = {r.rank: _gossip_notes(r.trace).get("origin_s") for r in rep.ranks}
    origins = {rank: origin for rank, origin in told.items() if origin is not None}
    if not origins or len(origins) < len(told):
        return None
    first = origins[rep.ranks[0].rank]
    return {rank: origin - first for rank, origin in origins.items()}


def measured_gossip(rep: Repetition) -> GossipTrace | None:
    """What ranks have recorded, None if they did not gossip."""
    ahead = clock_differences_s(rep)
    if ahead is None:
        return None
    met = {int(peer) for record in rep.ranks for peer in _gossip_notes(record.trace)["exchanges"]}
    elsewhere = sorted(met - ahead.keys())  # joined from there, or died: they left no record
    size = max(*ahead, *elsewhere, 0) + 1
    counts = [[0] * size for _ in range(size)]
    for record in rep.ranks:
        for peer, count in _gossip_notes(record.trace)["exchanges"].items():
            i, j = record.rank, int(peer)
            # Who lost its partner before it knew that both had all has not counted that one.
            counts[i][j] = counts[j][i] = max(counts[i][j], count)
    kept = {r.rank: _own_exchanges(r, ahead[r.rank]) for r in rep.ranks}
    gradients = {r.rank: _gradient_spans(r, ahead[r.rank]) for r in rep.ranks}
    return GossipTrace(
        gradients | {worker: [] for worker in elsewhere},
        _match_ends(kept),
        counts,
        max(_complete_since(r, kept[r.rank]) for r in rep.ranks),
    )


def predicted_gossip(trace: Trace) -> GossipTrace | None:
    """What was simulated, None if it was not gossip."""
    said = _gossip_notes(trace)
    if "pairs" not in said:
        return None
    size = said["workers"]
    counts = [[0] * size for _ in range(size)]
    for i, j, count in said["pairs"]:
        counts[i][j] = counts[j][i] = count
    gradients: dict[int, list[Span]] = {worker: [] for worker in range(size)}
    for worker, start, end in said["gradients"]:
        gradients[worker].append((start, end))
    exchanges = [Exchange(i, j, (s, e), (s, e), n) for i, j, s, e, n in said["exchanges"]]
    since_s = max((own[0][0] for own in gradients.values() if own), default=0.0)
    # What was not over at the end is not said.
    longest_s = max((one.at_i[1] - one.at_i[0] for one in exchanges), default=0.0)
    until_s = max((own[-1][1] for own in gradients.values() if own), default=0.0) - longest_s
    return GossipTrace(gradients, exchanges, counts, since_s, until_s)


def pack(of: GossipTrace) -> dict[str, Any]:
    """JSON-ready form of the window and the counts of the first workers."""
    start_s, end_s = of.window_s
    workers = sorted(of.gradients)[:MOST_WORKERS]
    shown = set(workers)

    def is_seen(span: Span) -> bool:
        return span[0] < end_s and span[1] > start_s

    def shift(span: Span) -> list[float]:
        return [round(s - start_s, 7) for s in span]

    return {
        "workers": workers,
        "all": len(of.gradients),
        "length_s": end_s - start_s,
        "gradients": [[shift(s) for s in of.gradients[rank] if is_seen(s)] for rank in workers],
        "exchanges": [
            [one.i, one.j, *shift(one.at_i), *shift(one.at_j), one.bytes]
            for one in of.exchanges
            if {one.i, one.j} <= shown and (is_seen(one.at_i) or is_seen(one.at_j))
        ],
        "counts": [[of.counts[i][j] for j in workers] for i in workers],
    }


def trace_events(
    of: GossipTrace, ahead_s: Mapping[int, float] | None = None
) -> list[dict[str, Any]]:
    """Exchanges as Chrome trace events: a lane for each worker, in its own seconds, of which the
    first worker's are so far ahead; arrows between partners."""
    ahead = ahead_s or {}
    events: list[dict[str, Any]] = []
    for rank in of.gradients:
        events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": EXCHANGES, "ts": 0})
        events[-1]["args"] = {"name": "exchanges"}
    for number, one in enumerate(of.exchanges):
        ends = (one.i, one.j, one.at_i), (one.j, one.i, one.at_j)
        for phase, (me, other, span) in zip("sf", ends, strict=True):
            start_s, end_s = (s - ahead.get(me, 0.0) for s in span)
            place = {"cat": "exchange", "pid": me, "tid": EXCHANGES, "ts": start_s * 1e6}
            about = {"partner": other, "bytes": one.bytes}
            name, dur = f"with {other}", (end_s - start_s) * 1e6
            events.append({**place, "name": name, "ph": "X", "dur": dur, "args": about})
            events.append({**place, "name": "pair", "ph": phase, "id": number, "args": {}})
    return events


def _gossip_notes(trace: Trace) -> Mapping[str, Any]:
    return trace.notes.get("gossip") or {}


def _gradient_spans(record: RankRecord, ahead_s: float) -> list[Span]:
    """Iterations, from end to end."""
    ends = [record.trace.starts_s[0], *record.trace.ends_s[0]]
    return [(start + ahead_s, end + ahead_s) for start, end in pairwise(ends)]


def _own_exchanges(record: RankRecord, ahead_s: float) -> dict[tuple[int, int], tuple[Span, int]]:
    """By partner and number, when an exchange was, and its bytes."""
    return {
        (peer, number): ((begin + ahead_s, end + ahead_s), size)
        for peer, number, begin, end, size in _gossip_notes(record.trace)["last"]
    }


def _match_ends(kept: Mapping[int, Mapping[tuple[int, int], tuple[Span, int]]]) -> list[Exchange]:
    """Both ends of every exchange, in order of time."""
    ends: dict[tuple[int, int, int], dict[int, tuple[Span, int]]] = {}
    for worker, own in kept.items():
        for (peer, number), what in own.items():
            key = min(worker, peer), max(worker, peer), number
            ends.setdefault(key, {})[worker] = what
    found = []
    for (i, j, _), said in ends.items():
        (at_i, size), (at_j, _) = said.get(i) or said[j], said.get(j) or said[i]
        found.append(Exchange(i, j, at_i, at_j, size))
    return sorted(found, key=lambda one: min(one.at_i[0], one.at_j[0]))


def _complete_since(record: RankRecord, kept: Mapping[Any, tuple[Span, int]]) -> float:
    """From when on a rank's record holds every exchange: records are bounded."""
    total = sum(_gossip_notes(record.trace)["exchanges"].values())
    if len(kept) >= total or not kept:
        return -math.inf
    return min(span[0] for span, _ in kept.values())
