"""Gossip in the report: gradients and exchanges of the workers in a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from offbeat.core import words
from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition
from offbeat.experiments.report.boxes import Box, Lane, Picture, Tie

SHOWN = 10  # length of the window, in mean times of a gradient
MOST_WORKERS = 64  # largest number of workers that get a lane
EXCHANGES = 1000  # thread id in a Chrome trace, sorted below all others

Span = tuple[float, float]  # start and end in seconds


class Exchange(NamedTuple):
    """One exchange of workers i < j, on the common clock.

    If one worker's record is missing, the span of the other worker is used for both.

    Attributes:
        i: smaller id.
        j: larger id.
        at_i: span of the exchange on worker i.
        at_j: span of the exchange on worker j.
        bytes: bytes sent in each direction.
    """

    i: int
    j: int
    at_i: Span
    at_j: Span
    bytes: int


class Part(NamedTuple):
    """Visible part of a gossip, in seconds from the begin of a window.

    Attributes:
        workers: the visible workers.
        length_s: length of the window.
        gradients: spans of gradients of each visible worker.
        exchanges: exchanges of visible workers.
    """

    workers: list[int]
    length_s: float
    gradients: list[list[Span]]
    exchanges: list[Exchange]


@dataclass(frozen=True)
class GossipTrace:
    """Gradients and exchanges of all workers, in seconds of the first worker's trace.

    Attributes:
        gradients: spans of gradients by worker; empty for a worker without a record, whose
            exchanges are known from its partners only.
        exchanges: the last exchanges, in order of time.
        since_s: start of the interval in which no exchange is missing.
        until_s: end of this interval.
    """

    gradients: Mapping[int, Sequence[Span]]
    exchanges: Sequence[Exchange]
    since_s: float = 0.0
    until_s: float = math.inf

    @property
    def unit_s(self) -> float:
        """Time of one gradient: mean over workers of their medians."""
        lengths = [[end - start for start, end in own] for own in self.gradients.values() if own]
        return fmean(map(median, lengths)) if lengths else 0.0

    @property
    def begin_s(self) -> float:
        """Time at which each worker has computed a gradient."""
        return max((own[0][1] for own in self.gradients.values() if own), default=0.0)

    @property
    def window_s(self) -> Span:
        """Last `SHOWN` units in which all workers computed."""
        end_s = min((own[-1][1] for own in self.gradients.values() if own), default=0.0)
        end_s = min(end_s, self.until_s)
        return min(end_s, max(self.since_s, end_s - SHOWN * self.unit_s)), end_s


def gossips_of(contestant: Contestant) -> dict[str, GossipTrace]:
    """Return measured and predicted gossip by "measured" and "predicted"; empty otherwise."""
    found = next((of for rep in contestant.complete if (of := measured_gossip(rep))), None)
    trace = contestant.predicted
    expected = predicted_gossip(trace) if trace else None
    return {k: of for k, of in (("measured", found), ("predicted", expected)) if of}


def clock_differences_s(rep: Repetition) -> dict[int, float] | None:
    """Return the seconds to add to each rank's times to obtain times of the first rank.

    None if the clocks were not compared.
    """
    told = {r.rank: _gossip_notes(r.trace).get("origin_s") for r in rep.ranks}
    origins = {rank: origin for rank, origin in told.items() if origin is not None}
    if not origins or len(origins) < len(told):
        return None
    first = origins[rep.ranks[0].rank]
    return {rank: origin - first for rank, origin in origins.items()}


def measured_gossip(rep: Repetition) -> GossipTrace | None:
    """Return the gossip recorded by all ranks; None for other strategies."""
    ahead = clock_differences_s(rep)
    if ahead is None:
        return None
    met = {int(peer) for record in rep.ranks for peer in _gossip_notes(record.trace)["exchanges"]}
    elsewhere = sorted(met - ahead.keys())  # workers without a record
    kept = {r.rank: _own_exchanges(r, ahead[r.rank]) for r in rep.ranks}
    gradients = {r.rank: _gradient_spans(r, ahead[r.rank]) for r in rep.ranks}
    return GossipTrace(
        gradients | {worker: [] for worker in elsewhere},
        _match_ends(kept),
        max(_complete_since(r, kept[r.rank]) for r in rep.ranks),
    )


def predicted_gossip(trace: Trace) -> GossipTrace | None:
    """Return the gossip in a simulated trace; None for other strategies."""
    notes = _gossip_notes(trace)
    if "pairs" not in notes:
        return None
    gradients: dict[int, list[Span]] = {worker: [] for worker in range(notes["workers"])}
    for worker, start, end in notes["gradients"]:
        gradients[worker].append((start, end))
    exchanges = [Exchange(i, j, (s, e), (s, e), n) for i, j, s, e, n in notes["exchanges"]]
    since_s = max((own[0][0] for own in gradients.values() if own), default=0.0)
    # Exchanges that had not finished at the end are missing in the trace.
    longest_s = max((one.at_i[1] - one.at_i[0] for one in exchanges), default=0.0)
    until_s = max((own[-1][1] for own in gradients.values() if own), default=0.0) - longest_s
    return GossipTrace(gradients, exchanges, since_s, until_s)


def visible_part(of: GossipTrace, length_s: float | None = None) -> Part:
    """Return the window of the first `MOST_WORKERS` workers.

    The window has at most `length_s` seconds, by default `SHOWN` mean times of a gradient.
    """
    start_s, end_s = of.window_s
    if length_s is not None:
        start_s = min(end_s, max(of.since_s, end_s - length_s, of.begin_s))
    workers = sorted(of.gradients)[:MOST_WORKERS]
    shown = set(workers)

    def is_seen(span: Span) -> bool:
        return span[0] < end_s and span[1] > start_s

    def shift(span: Span) -> Span:
        return span[0] - start_s, span[1] - start_s

    return Part(
        workers,
        end_s - start_s,
        [[shift(s) for s in of.gradients[rank] if is_seen(s)] for rank in workers],
        [
            Exchange(one.i, one.j, shift(one.at_i), shift(one.at_j), one.bytes)
            for one in of.exchanges
            if {one.i, one.j} <= shown and (is_seen(one.at_i) or is_seen(one.at_j))
        ],
    )


def gossip_picture(part: Part, label: str) -> Picture:
    """Return the gradients and exchanges of each worker, with lines between partners."""
    lanes = []
    for worker, gradients in zip(part.workers, part.gradients, strict=True):
        boxes = [
            Box(max(0.0, b), min(e, part.length_s), "c", f"worker {worker} computes a gradient\n"
                f"starts at {words.seconds(b)}, takes {words.seconds(e - b)}")
            for b, e in gradients
        ]  # fmt: skip
        lanes.append(Lane(f"worker {worker}", boxes, "low", first=True))
        spans = [(one, one.at_i if worker == one.i else one.at_j) for one in part.exchanges
                 if worker in (one.i, one.j)]  # fmt: skip
        exchanged = [
            Box(max(0.0, b), min(e, part.length_s), "n", _exchange_text(one, (b, e)))
            for one, (b, e) in sorted(spans, key=lambda of: of[1])
            if b < part.length_s and e > 0
        ]
        lanes.append(Lane("", exchanged, "low"))
    places = {worker: 2 * n + 1 for n, worker in enumerate(part.workers)}
    ties = []
    for one in part.exchanges:
        at_s = (max(one.at_i[0], one.at_j[0]) + min(one.at_i[1], one.at_j[1])) / 2
        if 0 < at_s < part.length_s:
            ends = places[one.i], places[one.j]
            ties.append(Tie(at_s, ends, _exchange_text(one, one.at_i)))
    return Picture(label, lanes, part.length_s, ties=ties)


def _exchange_text(one: Exchange, span: Span) -> str:
    seconds = span[1] - span[0]
    rate = f", {words.size(one.bytes / seconds)}/s" if seconds > 0 else ""
    return (
        f"exchange of workers {one.i} and {one.j}\nstarts at {words.seconds(span[0])}, takes "
        f"{words.seconds(seconds)}\n{words.size(one.bytes)} in each direction{rate}"
    )


def trace_events(
    of: GossipTrace, ahead_s: Mapping[int, float] | None = None
) -> list[dict[str, Any]]:
    """Return the exchanges as Chrome trace events, with arrows between partners.

    Each worker has a lane with times of its own clock: the common time minus `ahead_s[worker]`.
    """
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
    """Return the iterations of a rank, each from the end of the previous one to its own end."""
    ends = [record.trace.starts_s[0], *record.trace.ends_s[0]]
    return [(start + ahead_s, end + ahead_s) for start, end in pairwise(ends)]


def _own_exchanges(record: RankRecord, ahead_s: float) -> dict[tuple[int, int], tuple[Span, int]]:
    """Return span and bytes of each recorded exchange, by partner and number."""
    return {
        (peer, number): ((begin + ahead_s, end + ahead_s), size)
        for peer, number, begin, end, size in _gossip_notes(record.trace)["last"]
    }


def _match_ends(kept: Mapping[int, Mapping[tuple[int, int], tuple[Span, int]]]) -> list[Exchange]:
    """Combine both ends of each exchange; return the exchanges in order of time."""
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
    """Return the time from which a record holds all exchanges; records keep the last ones only."""
    total = sum(_gossip_notes(record.trace)["exchanges"].values())
    if len(kept) >= total or not kept:
        return -math.inf
    return min(span[0] for span, _ in kept.values())
