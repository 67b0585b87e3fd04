"""DreamDDP: partial synchronization with sets of layers whose averages fit under backward.

Algorithm 1   `pieces.partial`: what training computes.
Algorithm 2   `sets.algorithm_2`: the sets of layers; `sets.fill` is Section 3.4.
Planner       `DreamDDP.averages` below: candidates, the cheapest one, its plan.

Candidates are the ways to average every layer once per period. Every way becomes one `Candidate`,
so that one price and one function to a plan serve all of them:

    of_layers      sets of whole layers: Algorithm 2, or `balanced`
    of_runs        runs of neighbouring layers as one message each
    of_slices      a slice of the first, or of all layers in every iteration
    all_at_once    all layers in one iteration, as local SGD
    of_delay       snapshots that arrive some iterations later
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Moment, Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.averaging import Layerwise, periods
from offbeat.strategies.compressible import NONE, with_wires
from offbeat.strategies.dreamddp.late import (
    Planning,
    best_order,
    costs,
    delayed_bound_s,
    delayed_plan,
    delayed_sets,
    exchanged,
    forward_bound_s,
    runs,
)
from offbeat.strategies.dreamddp.sets import EXACT, Cycle, algorithm_2, balanced, fill
from offbeat.strategies.equations import Equations, StatePolicy
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.outer_optimizer import is_real
from offbeat.strategies.pieces import (
    Clip,
    Piece,
    Sets,
    delayed,
    layer_set_facts,
    layer_sets,
    partial,
    partial_plan,
    whole_buckets,
)

Due = Literal["end", "forward", "delayed"]

SLICES_GAIN = 0.02  # relative gain required of slices with `split="auto"`: they are more messages
PREDICTED_GAIN = 0.005  # relative gain required of later candidates if their prices are simulated
PREDICTED = 160  # iterations of a simulation with noise
MOST_PREDICTED = 300  # largest number of buckets for simulations with noise
SUGGESTED_DELAYS = (1, 2, 4)  # delays that advice compares
MOST_SLICES = 4000  # largest number of slices of all buckets: more save little and plan slowly
MOST_RUNS = 4  # largest number of runs per iteration
MOST_PIECES = 6000  # largest number of pieces in all sets with some slices
BEST_SLICED = 2  # candidates with some slices that are compared with the others
MOST_SOLVED = 640  # largest number of slices around which other layers are balanced
ROUNDING = 1e-9


@dataclass(frozen=True)
class DreamDDP(Layerwise):
    """Average sets of layers under backward, one set per iteration, chosen to fit there.

    By default the planner compares sets of any layers, of runs of neighbouring layers, a slice of
    the first or of all layers in every iteration, and all layers in one iteration as in local SGD.
    It uses the candidate with the shortest predicted period.

    `due` (extension of offbeat) sets the deadline of averages. `forward` has the same equations.
    `delayed` (`w += mean(snapshot) - snapshot`) trains with stale averages, needs two more copies
    of the parameters and sends whole buckets. The optimizer makes one step for all buckets, so
    clipping and GradScaler work. Both settings use the plan of `due="end"` if that is predicted to
    be faster. `gain` below 1 applies a share of the difference: when it arrives, training has
    already reduced it in the directions in which the loss is steep.

    `clip` bounds the norm of a worker's own gradients, as `clip_grad_norm_` does. Updates in
    backward come before that norm is known. Such updates use the norm of the previous iteration;
    the first iteration uses the norm of the buckets so far. With `average="before_update"` the norm
    of the current iteration is used.
    """

    solver: Literal["auto", "optimal", "balanced", "dfs"] = "auto"
    """Solver for the sets: `dfs` (Algorithm 2 of the paper) or `optimal`, sets of neighbouring
    layers, exactly; `balanced` (any layers); `auto`: both, runs of layers as one message, and all
    layers in one iteration."""
    fill: Literal["auto", True, False] = "auto"
    """Whether iterations average further layers of the output side that add no time; `auto`: unless
    jitter makes the plan slower, or a codec (`wire`) is set to reduce bytes."""
    split: Literal["auto", True, False] = "auto"
    """Whether layers are cut into one slice per iteration; `auto`: if that saves at least 2 %."""
    state: StatePolicy = field(default="local", kw_only=True)
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`,
    more bytes), or clear it (`reset`)."""
    due: Due = "end"
    """Deadline of a message, and so the compute that hides it: the rest of backward (`end`), also
    the next forward up to the bucket's own (`forward`), or `delay` further iterations
    (`delayed`)."""
    delay: int = 1
    """Number of iterations that train while an average is in flight (`due="delayed"`)."""
    gain: float = 1.0
    """Share of the difference from the average that a delayed average corrects, above 0 and at most
    1. A share of 0.5 avoids most of the loss that a long delay costs."""
    clip: float | None = None
    """Bound on the norm of a worker's gradients; None: no clipping."""

    name: ClassVar[str] = "dreamddp"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(
            "delay", self.delay, remedy="due='forward' lands averages without being stale"
        )
        for is_wrong, text in self._mistakes():
            if is_wrong:
                raise ValueError(text)

    def _mistakes(self) -> Iterator[tuple[bool, str]]:
        """Yield settings that cannot be combined: whether they are, and what to do instead."""
        late = self.due == "delayed"
        yield (
            self.clip is not None and not 0 < self.clip < inf,
            f"clip ({self.clip}) must be a norm above 0, or None for no clipping",
        )
        yield (
            not is_real(self.gain) or not 0 < self.gain <= 1,
            f"gain ({self.gain!r}) must lie above 0 and be at most 1; 1 corrects the whole "
            "difference",
        )
        for name, default in (("delay", 1), ("gain", 1)):
            value = getattr(self, name)
            yield (
                not late and value != default,
                f"{name} ({value:g}) counts only with due 'delayed'; due is {self.due!r}: leave "
                f"{name} out, or use due='delayed'",
            )
        yield (
            self.gain != 1 and self.outer is not None,
            f"gain ({self.gain:g}) counts only without outer; leave one of them out",
        )
        yield (
            late and self.delay >= self.period,
            f"delay ({self.delay}) must be below the period ({self.period}): a bucket's next "
            "snapshot takes the room of its last one; use a smaller delay or a longer period",
        )
        yield (
            late and self.state != "local",
            f"state ({self.state!r}) must be left out with due 'delayed', which averages "
            "parameters alone; or use due='forward'",
        )
        for name in ("fill", "split"):
            yield (
                self._averages_whole_layers and getattr(self, name) is True,
                f"{name} (True) must be left out with outer ({self.outer}) and due {self.due!r}, "
                "which average whole layers once per period",
            )
        yield (
            self.split is True and self.state == "reset",
            "split (True) must be left out with state 'reset': a slice has no optimizer state of "
            "its own to reset; use state='local' or 'averaged'",
        )
        yield (
            self.clip is not None and self.due == "forward" and self.average == "before_update",
            f"clip ({self.clip}) needs all gradients at once; with due 'forward' and average "
            "'before_update' each bucket is updated at its own forward; use due='end'",
        )

    @property
    def _averages_whole_layers(self) -> bool:
        return self.outer is not None or self.due == "delayed"

    # ---- the planner -------------------------------------------------------------------------

    def averages(self, profile: Profile) -> Plan:
        job = self._job(profile)
        plan = plan_of(job, self._cheapest(job))
        if self.due != "end" and plan.fact("staleness") is None:
            plan = replace(plan, facts=(*plan.facts, *costs()))
        return plan if self.clip is None else _with_clipping(plan, self.clip)

    def _cheapest(self, job: Planning) -> Candidate:
        """Return the candidate with the shortest predicted period.

        Candidates are priced in the order of their closed forms. A later one must save a share,
        because small differences of simulated periods may be noise.
        """
        best, best_s = None, inf
        for one in sorted(self._candidates(job), key=self._closed_s):
            if self._closed_s(one) >= best_s * (1 - EXACT):
                break  # the closed form is a lower bound of the price
            seconds = self._price(job, one) * self._handicap(one)
            if best is None or seconds < best_s * (1 - self._gain(job.profile)):
                best, best_s = one, seconds
        assert best is not None
        if self.fill is False or self.outer is not None or best.due == "delayed":
            return best
        if self.fill == "auto" and self.wire != NONE:
            return best
        full = filled(job, best)
        costs_s = self._price(job, full) * self._handicap(best)
        return full if self.fill is True or costs_s <= best_s * (1 + ROUNDING) else best

    def _candidates(self, job: Planning) -> Iterator[Candidate]:
        """Yield candidates for both deadlines. Those that cannot save time are left out."""
        dues: tuple[Due, ...] = ("end", "forward") if self.due == "forward" else ("end",)
        noisy = _is_noisy(job.profile)  # then fewer messages may win against shorter closed forms
        for due in dues:
            found = of_layers(job, due, self.solver)
            below = min(one.seconds for one in found) * (1 - EXACT)
            if self.solver == "auto":
                found += all_at_once(job, due)
                found += of_runs(job, due, inf if noisy else below)
            if self._may_split(job):
                found += of_slices(job, due, inf if self.split is True else below)
            if due == "forward" and self.solver == "auto":
                found = [improved(job, one) for one in found]
            yield from found
        if self.due == "delayed":
            yield from of_delay(job, self.solver)

    def _price(self, job: Planning, one: Candidate) -> float:
        """Return the predicted seconds of a period.

        Without noise the closed form is the prediction, except for delayed averages.
        """
        exact = one.due != "delayed" and not _is_noisy(job.profile)
        if exact or (one.due != "delayed" and job.buckets > MOST_PREDICTED):
            return one.seconds
        iterations = -(-PREDICTED // job.period) * job.period if _is_noisy(job.profile) else None
        predicted = predict_plan(plan_of(job, one), job.profile, iterations=iterations)
        return predicted.iteration_s * job.period

    def _closed_s(self, one: Candidate) -> float:
        return one.seconds * self._handicap(one)

    def _gain(self, profile: Profile) -> float:
        return PREDICTED_GAIN if _is_random(profile) else EXACT

    def _handicap(self, one: Candidate) -> float:
        return 1 / (1 - SLICES_GAIN) if self.split == "auto" and one.is_sliced else 1.0

    def _may_split(self, job: Planning) -> bool:
        if self.outer is not None or self.split is False:
            return False
        few = job.buckets * job.period <= MOST_SLICES
        return self.split is True or (self.solver == "auto" and self.state != "reset" and few)

    def _job(self, profile: Profile) -> Planning:
        delay = self.delay if self.due == "delayed" else 0
        return Planning(self.name, profile, self.period, self.when, self.state, delay, self.gain)

    # ---- what the rest of offbeat asks -------------------------------------------------------

    def equations(self, plan: Plan) -> Equations:
        early = any(effects.is_update(a) and a.at.point == "grad" for a in plan.applies)
        clip = None if self.clip is None else Clip(self.clip, plan.buckets if early else None)
        late = layer_sets(plan, "average")
        if any(late):
            return delayed(late, self.delay, self.when, clip, self.outer_equations, self.gain)
        return partial(layer_sets(plan), self.when, self.state, clip, self.outer_equations)

    def bound_s(self, profile: Profile) -> float:
        job = self._job(profile)
        if self.due == "forward":
            return forward_bound_s(job, cycle_of(job, "forward"))
        return delayed_bound_s(job) if self.due == "delayed" else super().bound_s(profile)

    @property
    def applies_late(self) -> bool:
        return self.due == "delayed"

    def at_step(self) -> Planned | None:
        if self.due == "forward":  # with either `average` each bucket is updated separately
            return replace(self, average="before_update", due="end")
        return super().at_step()

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update" and self.due != "delayed"

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        every = [cls(p, due=due) for p in periods(max_staleness + 1) for due in ("end", "forward")]
        every += [
            cls(period, due="delayed", delay=delay)
            for delay in SUGGESTED_DELAYS
            for period in periods(max_staleness + 1 - delay)
            if delay < period
        ]
        return with_wires(every)


def _is_random(profile: Profile) -> bool:
    """Return whether compute or messages vary, so that predictions of periods do."""
    return bool(any(profile.jitters) or profile.default_link.jitter)


def _is_noisy(profile: Profile) -> bool:
    """Return whether compute varies, messages use processor time, or pauses delay messages."""
    link = profile.default_link
    uses_cpu = link.cpu_s_per_message or link.cpu_s_per_byte
    return bool(_is_random(profile) or link.after_pause or uses_cpu)


def _with_clipping(plan: Plan, norm: float) -> Plan:
    """Return the plan with a bound on the norm of a worker's own gradients.

    Updates at the step use the norm of the current iteration, updates in backward that of the
    previous one.
    """
    applies = []
    for apply in plan.applies:
        if effects.is_update(apply):
            rule = "clip_early" if apply.at.point == "grad" else "clip"
            args = (("buffer", "grad"), ("norm", float(norm)))
            applies.append(Apply(rule, apply.buckets, apply.at, apply.phases, args=args))
        applies.append(apply)
    return replace(plan, applies=tuple(applies))


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
