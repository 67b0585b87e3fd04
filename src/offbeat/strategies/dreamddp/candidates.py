"""Candidates of DreamDDP: the ways to average every layer once per period, which its planner
compares.

Every way becomes one `Candidate`, so that one price and one function to a plan serve all of them:

    of_layers      sets of whole layers: Algorithm 2, or `balanced`
    of_runs        runs of neighbouring layers as one message each
    of_slices      a slice of the first, or of all layers in every iteration
    all_at_once    all layers in one iteration, as local SGD
    of_delay       snapshots that arrive some iterations later
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

from offbeat.core.plan import Moment, Plan
from offbeat.strategies.dreamddp.late import (
    Planning,
    best_order,
    delayed_plan,
    delayed_sets,
    exchanged,
    runs,
)
from offbeat.strategies.dreamddp.sets import EXACT, Cycle, algorithm_2, balanced, fill
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.pieces import Piece, Sets, layer_set_facts, partial_plan, whole_buckets

Due = Literal["end", "forward", "delayed"]

MOST_SLICES = 4000  # largest number of slices of all buckets: more save little and plan slowly
MOST_RUNS = 4  # largest number of runs per iteration
MOST_PIECES = 6000  # largest number of pieces in all sets with some slices
BEST_SLICED = 2  # candidates with some slices that are compared with the others
MOST_SOLVED = 640  # largest number of slices around which other layers are balanced
ROUNDING = 1e-9


class Candidate(NamedTuple):
    """One way to average every layer once per period.

    Attributes:
        pieces: buckets, runs of buckets, or slices of a bucket, each averaged as one.
        sends: for each iteration of the period, the pieces that it sends, in order.
        fill: for each iteration, those of its pieces that another iteration sends, too.
        due: deadline of the messages.
        seconds: seconds of a period without jitter; a lower bound if `due` is "delayed".
        at_step: whether all buckets are updated and averaged at the step, as in local SGD.
    """

    pieces: list[Piece]
    sends: Sets
    fill: Sets
    due: Due
    seconds: float
    at_step: bool = False

    @property
    def is_sliced(self) -> bool:
        return any(piece.parts > 1 for piece in self.pieces)


def cycle_of(job: Planning, due: Due, pieces: Sequence[Piece] = ()) -> Cycle:
    """Return one iteration of the slowest rank, as the messages of these pieces see it.

    With `due="end"` it begins with the first forward, with `due="forward"` with that of bucket 0.
    An update follows the backward of its bucket. With `average="before_update"` it takes place at
    the step, or before the forward that waits for the average.
    """
    if due not in job.known:
        job.known[due] = _cycle_of_buckets(job, due)
    whole: Cycle = job.known[due]
    if not pieces:
        return whole
    last = [piece.buckets[-1] for piece in pieces]
    ready, tail = ([times[b] for b in last] for times in (whole.ready, whole.tail))
    return Cycle(ready, job.seconds_of(pieces), tail, whole.least)


def _cycle_of_buckets(job: Planning, due: Due) -> Cycle:
    slow, early = job.profile.slowest(), job.average == "after_update"
    both = list(zip(slow.buckets, slow.bucket_step_s, strict=True))
    backward = [b.backward_s + (u if early else 0.0) for b, u in both]
    if due == "end":
        forward = [b.forward_s for b in slow.buckets]
        rest = slow.other_s + (0.0 if early else slow.update_s)
        start, tail = sum(forward), [rest] * job.buckets
    else:
        forward = [b.forward_s + (0.0 if early else u) for b, u in both]
        rest = slow.other_s
        start, tail = forward[0], list(accumulate([0.0, *forward[1:]]))
    ready = [start + s for s in accumulate(backward)]
    return Cycle(ready, job.bucket_s(), tail, sum(forward) + sum(backward) + rest)


# ---- the candidates --------------------------------------------------------------------------


def of_layers(job: Planning, due: Due, solver: str) -> list[Candidate]:
    """Return sets of whole layers: neighbouring ones (Algorithm 2), any, or both (`auto`)."""
    pieces, cycle = whole_buckets(job.buckets), cycle_of(job, due)
    solvers = {"auto": [algorithm_2, balanced], "balanced": [balanced]}.get(solver, [algorithm_2])
    return [of_sets(job, due, pieces, solve(cycle, job.period), cycle) for solve in solvers]


def of_runs(job: Planning, due: Due, below: float = inf) -> Iterator[Candidate]:
    """Yield sets of runs of neighbouring layers, each run one message: fewer latencies.

    Args:
        job: settings of the averages.
        due: deadline.
        below: seconds of a period that candidates have to save; `inf` yields all numbers of runs,
            for iterations that differ: fewer of them then wait for messages.
    """
    alone, found = sum(job.bucket_s()), []
    for n in range(min(job.buckets - 1, MOST_RUNS * job.period).bit_length()):
        pieces = runs(job, 2**n)
        cycle = cycle_of(job, due, pieces)
        saves = below == inf or sum(cycle.message) < alone * (1 - ROUNDING)
        if saves and cycle.bound(job.period) * job.period < below:
            found.append(of_sets(job, due, pieces, balanced(cycle, job.period), cycle))
    yield from found if below == inf else sorted(found, key=_seconds)[:1]


def of_slices(job: Planning, due: Due, below: float = inf) -> Iterator[Candidate]:
    """Yield sets in which every iteration sends a slice of each of the first layers: something to
    send early. The other layers are balanced around these slices.

    With slices of all layers, all iterations are equal, and reach `Cycle.bound` without latency.
    These sets are yielded, and the best ones with slices of a part.

    Args:
        job: settings of the averages.
        due: deadline.
        below: seconds of a period that candidates have to save.
    """
    period, size, found, left = job.period, job.buckets, [], MOST_PIECES
    whole = whole_buckets(size)

    def candidate(first: int) -> Iterator[Candidate]:
        slices = [Piece(piece.buckets, h, period) for piece in whole[:first] for h in range(period)]
        pieces = slices + whole[first:]
        cycle = cycle_of(job, due, pieces)
        if cycle.bound(period) * period < below:
            given = tuple(tuple(range(h, first * period, period)) for h in range(period))
            sets = balanced(cycle, period, given) if first < size else given
            yield of_sets(job, due, pieces, sets, cycle)

    if size * period <= MOST_SLICES:
        yield from candidate(size)
    for first in (64, 32, 16, *range(8, 0, -1)):
        if first < size and first * period <= MOST_SOLVED:
            left -= size + first * (period - 1)
            if left < 0 and found:
                break
            found += candidate(first)
    yield from sorted(found, key=_seconds)[:BEST_SLICED]


def of_sets(
    job: Planning, due: Due, pieces: list[Piece], sets: Sets, cycle: Cycle | None = None
) -> Candidate:
    """Return the candidate of these sets, each in its best order."""
    cycle = cycle or cycle_of(job, due, pieces)
    orders = tuple(best_order(cycle, members) for members in sets)
    none: Sets = ((),) * job.period
    return Candidate(pieces, orders, none, due, sum(map(cycle.seconds, orders)))


def improved(job: Planning, one: Candidate) -> Candidate:
    """Return the candidate after exchanges between its iterations."""
    if one.at_step or len(one.pieces) < 2:
        return one
    cycle = cycle_of(job, one.due, one.pieces)
    orders = exchanged(cycle, one.sends)
    return one._replace(sends=orders, seconds=sum(map(cycle.seconds, orders)))


def filled(job: Planning, plain: Candidate) -> Candidate:
    """Return the candidate with further layers that its iterations have time for (Section 3.4)."""
    if plain.at_step or plain.due == "delayed":
        return plain
    cycle = cycle_of(job, plain.due, plain.pieces)
    sends, more = [], []
    found = fill(cycle, tuple(tuple(sorted(order)) for order in plain.sends))
    for order, others in zip(plain.sends, found, strict=True):
        limit, kept, longer = cycle.seconds(order) * (1 + EXACT), len(others), order
        while kept:  # repeats with growing tails only, see `Cycle.cost`
            longer = best_order(cycle, (*order, *others[:kept]))
            if cycle.seconds(longer) <= limit:
                break
            kept -= max(kept // 4, 1)
        sends.append(longer if kept else order)
        more.append(others[:kept])
    return plain._replace(sends=tuple(sends), fill=tuple(more))


def all_at_once(job: Planning, due: Due) -> Iterator[Candidate]:
    """Yield one average of all layers in the last iteration: at the last gradient, and at the step,
    as in local SGD."""
    pieces, none = [Piece(range(job.buckets))], ((),) * job.period
    one = of_sets(job, due, pieces, (*none[1:], (0,)))
    yield one
    if job.average == "after_update":
        slow = job.profile.slowest()
        hidden = slow.other_s if due == "forward" else 0.0
        seconds = job.period * slow.compute_s + max(sum(job.seconds_of(pieces)) - hidden, 0.0)
        yield one._replace(seconds=seconds, at_step=True)


def of_delay(job: Planning, solver: str) -> Iterator[Candidate]:
    """Yield averages of snapshots that arrive `job.delay` iterations later."""
    none: Sets = ((),) * job.period
    least = job.profile.slowest().compute_s
    found = delayed_sets(job)
    if solver != "auto":
        found = ((one.pieces, one.sends) for one in of_layers(job, "end", solver))
    for pieces, sets in found:
        seconds = max(job.period * least, sum(job.seconds_of(pieces)))
        yield Candidate(pieces, sets, none, "delayed", seconds)


_seconds = attrgetter("seconds")


# ---- from a candidate to a plan --------------------------------------------------------------


def plan_of(job: Planning, one: Candidate) -> Plan:
    """Return the plan of a candidate: Algorithm 1 with the moments of messages and updates."""
    if one.due == "delayed":
        return delayed_plan(job, one.pieces, one.sends)
    if one.at_step:
        return _local_sgd_plan(job, one)
    return partial_plan(
        job.name,
        job.profile,
        one.pieces,
        one.sends,
        job.average,
        job.state,
        fill=one.fill,
        late=one.due == "forward",
    )


def _local_sgd_plan(job: Planning, one: Candidate) -> Plan:
    plan = LocalSGD(job.period, state=job.state).averages(job.profile)
    transfers = plan.transfers
    if one.due == "forward":  # the first forward needs the last bucket, so it needs the message
        due = Moment("forward", job.buckets - 1, 1)
        transfers = tuple(replace(t, before=due) for t in transfers)
    facts = layer_set_facts(one.sends, one.fill, one.pieces)
    return replace(plan, strategy=job.name, transfers=transfers, facts=facts)
