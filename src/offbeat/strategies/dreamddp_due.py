"""Planning of DreamDDP's averages that also hide behind the forward pass (extension of the paper).

`forward`: the average of a piece is due at the piece's next forward. The equations are those of the
paper's variant with the same sets. `delayed`: a snapshot is averaged while training continues, and
is applied some iterations later as `w += mean(snapshot) - snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple, TypeVar

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Buffer, Fact, Moment, Payload, Phases, Plan, local, transfer
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan, simulate
from offbeat.core.strategy.interface import StatePolicy
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.partial_sync import Average, Piece, layer_set_facts, whole_buckets
from offbeat.strategies.solvers import Sets
from offbeat.strategies.solvers.due import MOST_WORK, Cycle, Orders, Work, due_sets, greedy, refill
from offbeat.strategies.solvers.stages import cut

CLIMBED = 2  # cuts (sets of buckets in slices) whose sets are searched
MOST_CLIMBED = 400  # largest number of pieces for a search; with more the greedy sets are used
SEARCHES_WORK = 1_000_000  # work of all searches for sets together: see `due_sets`
MOVES = 24  # sets of a delayed plan that are simulated
# relative gain required of other sets in a delayed plan, as most have more messages
WORTH_MORE = 0.005
ROUNDING = 1e-9

One = TypeVar("One")


@dataclass(frozen=True)
class Setting:
    """Inputs of both planners: strategy name, profile and settings of the average.

    Attributes:
        gain: share of a difference that a delayed average corrects.
    """

    name: str
    profile: Profile
    period: int
    average: Average
    state: StatePolicy
    gain: float = 1.0

    @property
    def buckets(self) -> int:
        return len(self.profile.buckets)


class Candidate(NamedTuple):
    """Pieces, the sets that iterations average, and additional averages (`fill`), as indices of
    pieces.

    Attributes:
        pieces: buckets, or slices of buckets, that are averaged as one.
        sets: for each iteration of the period, the pieces that it averages.
        fill: for each iteration, further pieces, which another iteration averages too.
        cost_s: seconds of a period without its forward passes.
        at_step: update and average all buckets at the step, as in local SGD, not bucket by bucket.
    """

    pieces: list[Piece]
    sets: Sets
    fill: Sets = ()
    cost_s: float = 0.0
    at_step: bool = False


class Choice(NamedTuple):
    """Pieces, the order in which iterations send them, and additional averages (`fill`).

    Attributes:
        pieces: buckets, or slices of buckets, that are averaged as one.
        orders: for each iteration of the period, the pieces that it sends, in order.
        fill: for each iteration, the pieces of its order that another iteration sends too.
        closed_s: seconds of a period without jitter.
        at_step: average all buckets at the step, as in local SGD.
    """

    pieces: list[Piece]
    orders: Orders
    fill: Sets
    closed_s: float
    at_step: bool = False


# ---- due at the next forward ----------------------------------------------------------------


def forward_cycle(setting: Setting, pieces: Sequence[Piece], *, single: bool = True) -> Cycle:
    """Return one iteration of the slowest rank, from the forward of bucket 0 to the next one.

    With `single`, each bucket is updated separately, and its update includes the time of an
    optimizer call.
    """
    slowest, early = setting.profile.slowest(), setting.average == "after_update"
    update_s = slowest.bucket_step_s if single else slowest.bucket_update_s
    times = [(b.forward_s, b.backward_s) for b in slowest.buckets]
    # An update follows the backward of its bucket, or precedes the forward that waits for the
    # average.
    forward_s = [f + (0.0 if early else u) for (f, _), u in zip(times, update_s, strict=True)]
    backward_s = [b + (u if early else 0.0) for (_, b), u in zip(times, update_s, strict=True)]
    ready_s = [forward_s[0] + seconds for seconds in accumulate(backward_s)]
    left_s = list(accumulate([0.0, *forward_s[1:]]))
    return Cycle(
        [ready_s[piece.buckets[-1]] for piece in pieces],
        [piece.seconds(setting.profile, setting.state) for piece in pieces],
        [left_s[piece.buckets[-1]] for piece in pieces],
        slowest.other_s + sum(forward_s) + sum(backward_s),
    )


def forward_plan_bound_s(setting: Setting) -> float:
    """Return a lower bound on the seconds per iteration of all plans with `due="forward"`.

    It is `solve.due.bound_s` with one message for the buckets k, k+1, ... and one call of the
    optimizer.
    """
    cycle = forward_cycle(setting, whole_buckets(setting.buckets), single=False)
    link = setting.profile.default_link.name
    later_s = setting.profile.messages_ending_s(link, "param", 0, setting.buckets)
    # If updates do not run in backward, an average may also start at the step.
    heads = zip(cycle.ready_s, later_s.tolist(), cycle.left_s, strict=True)
    return max(cycle.least_s, *(r + c / setting.period + q for r, c, q in heads))


def forward_choices(
    setting: Setting, start: Candidate, cuts: Iterable[frozenset[int]], *, search: bool
) -> Iterator[Choice]:
    """Yield choices: the variant `start` with later deadlines, and its sets in their best order.

    With `search`, also yield better sets of the same pieces, of whole buckets, and of buckets cut
    into slices by each of `cuts`.
    """
    pieces, sets = start.pieces, start.sets
    if start.at_step:
        yield _local_sgd_choice(setting, pieces)
        pieces = whole_buckets(setting.buckets)
    else:
        yield _keep_sets(setting, start)
        yield _order_sets(setting, pieces, sets)
    if not search:
        return
    # Pieces and initial sets of each search. All searches share one budget of work.
    searches = [(pieces, [] if start.at_step else [sets])]
    if any(piece.parts > 1 or len(piece.buckets) > 1 for piece in pieces):
        searches.append((whole_buckets(setting.buckets), []))
    rough: list[tuple[float, int, list[Piece]]] = []
    for n, sliced in enumerate(cuts):
        pieces = cut_into(sliced, setting)
        cycle = forward_cycle(setting, pieces)
        tried = greedy(cycle, setting.period), _spread_evenly(pieces, setting.period)
        seconds = min(sum(cycle.best(members)[0] for members in one) for one in tried)
        rough.append((seconds, n, pieces))
    for _, _, pieces in sorted(rough, key=lambda one: one[:2])[:CLIMBED]:
        searches.append((pieces, [_spread_evenly(pieces, setting.period)]))
    left = SEARCHES_WORK
    for n, (pieces, starts) in enumerate(searches):
        given = min(MOST_WORK, left // (len(searches) - n))
        work = Work(given)
        yield _search_sets(setting, pieces, starts, work)
        left -= given - max(work.left, 0)


def _keep_sets(setting: Setting, start: Candidate) -> Choice:
    """Return the sets and fill of the candidate, in ready order, with later deadlines."""
    cycle = forward_cycle(setting, start.pieces)
    both = zip(start.sets, start.fill, strict=True)
    orders = tuple(tuple(sorted(chain(*members))) for members in both)
    return Choice(start.pieces, orders, start.fill, sum(map(cycle.seconds, orders)))


def _order_sets(setting: Setting, pieces: list[Piece], sets: Sets) -> Choice:
    """Return the sets, each in its best order."""
    cycle = forward_cycle(setting, pieces)
    found = [cycle.best(members) for members in sets]
    orders = tuple(order for _, order in found)
    return Choice(pieces, orders, ((),) * setting.period, sum(seconds for seconds, _ in found))


def _search_sets(setting: Setting, pieces: list[Piece], starts: list[Sets], work: Work) -> Choice:
    """Return the best sets of a search; with more than `MOST_CLIMBED` pieces, of the initial and
    greedy sets."""
    cycle = forward_cycle(setting, pieces)
    if len(pieces) <= MOST_CLIMBED:
        return _order_sets(setting, pieces, due_sets(cycle, setting.period, starts, work))
    tried = [_order_sets(setting, pieces, s) for s in (*starts, greedy(cycle, setting.period))]
    return min(tried, key=lambda choice: choice.closed_s)


def _local_sgd_choice(setting: Setting, pieces: list[Piece]) -> Choice:
    """Return the choice of local SGD: all buckets at once, hidden behind the time before the next
    forward."""
    other_s = setting.profile.slowest().other_s
    message_s = sum(piece.seconds(setting.profile, setting.state) for piece in pieces)
    closed_s = setting.period * setting.profile.slowest().compute_s + max(message_s - other_s, 0.0)
    none: Sets = ((),) * setting.period
    return Choice(pieces, (*none[1:], tuple(range(len(pieces)))), none, closed_s, at_step=True)


def cut_into(sliced: frozenset[int], setting: Setting) -> list[Piece]:
    """Return the pieces: one slice per iteration of each bucket in `sliced`, the other buckets
    whole."""
    pieces: list[Piece] = []
    for one in whole_buckets(setting.buckets):
        parts = setting.period if one.buckets[0] in sliced else 1
        pieces += [Piece(one.buckets, part, parts) for part in range(parts)]
    return pieces


def _spread_evenly(pieces: Sequence[Piece], period: int) -> Sets:
    """Return sets with each slice in an iteration of its own, and whole buckets in rotation."""
    sets: list[list[int]] = [[] for _ in range(period)]
    for i, piece in enumerate(pieces):
        sets[(piece.part if piece.parts > 1 else piece.buckets[0]) % period].append(i)
    return tuple(map(tuple, sets))


def with_fill(setting: Setting, choice: Choice) -> Choice:
    """Return the choice with additional pieces that iterations can send in the same time."""
    if choice.at_step or any(choice.fill):
        return choice
    cycle = forward_cycle(setting, choice.pieces)
    fill = refill(cycle, choice.orders)
    both = zip(choice.orders, fill, strict=True)
    orders = tuple(cycle.best((*own, *more))[1] if more else own for own, more in both)
    return choice._replace(orders=orders, fill=fill)


def forward_plan(setting: Setting, choice: Choice) -> Plan:
    """Return the plan of a choice: releases as in the paper's variant, deadlines at the next
    forward of each bucket."""
    pieces, size = choice.pieces, setting.buckets
    if choice.at_step:
        return _late_local_sgd_plan(setting, choice)
    early = setting.average == "after_update"
    transfers, applies = [], []
    for h, order in enumerate(choice.orders):
        for i in order:
            next_ = Moment("forward", pieces[i].buckets[-1], 1)
            transfers += pieces[i].averages(
                setting.profile, setting.state, before=next_, phases=(h,)
            )
            if setting.state == "reset":
                at = Moment("end") if early else next_
                applies.append(Apply("reset", pieces[i].buckets, at, Phases((h,))))
    at = Moment("grad") if early else Moment("forward", lag=1)
    applies.append(local(size, at, range(setting.period)))
    return Plan(
        setting.name,
        size,
        tuple(transfers),
        tuple(applies),
        period=setting.period,
        facts=_forward_facts(choice),
    )


def _late_local_sgd_plan(setting: Setting, choice: Choice) -> Plan:
    plan = LocalSGD(setting.period, state=setting.state).schedule(setting.profile)
    # The message holds all buckets, so it is due at the forward of the first of them.
    due = Moment("forward", setting.buckets - 1, 1)
    transfers = tuple(replace(t, before=due) for t in plan.transfers)
    return replace(plan, strategy=setting.name, transfers=transfers, facts=_forward_facts(choice))


def bucketwise_plan(setting: Setting) -> Plan:
    """Return local SGD with one message per bucket after the step, in the order of the next
    forward."""
    plan = LocalSGD(setting.period, state=setting.state).schedule(setting.profile)
    messages = [
        replace(
            t,
            payload=replace(t.payload, buckets=range(b, b + 1)),
            before=Moment("forward", b, 1),
        )
        for b in reversed(range(setting.buckets))
        for t in plan.transfers
    ]
    return replace(plan, strategy=setting.name, transfers=tuple(messages))


def _forward_facts(choice: Choice) -> tuple[Fact, ...]:
    both = zip(choice.orders, choice.fill, strict=True)
    sets = tuple(tuple(sorted(set(order) - set(more))) for order, more in both)
    return (*layer_set_facts(sets, choice.fill, choice.pieces), *_cost_facts(0, 0))


def _cost_facts(memory_bytes: int, staleness: int) -> tuple[Fact, ...]:
    """Return facts about the costs in memory and staleness, compared with the paper's variant."""
    return (
        Fact("memory_bytes", memory_bytes, "further buffers on every rank"),
        Fact("staleness", staleness, "iterations that train without an average that has begun"),
    )


# ---- delayed --------------------------------------------------------------------------------


def delayed_plan_bound_s(setting: Setting) -> float:
    """Return `max(F + B, C / H)`, where the update is part of F + B.

    Each rank computes everything in every iteration, and the link carries all parameters once per
    period of H iterations. A long enough delay hides all other time.
    """
    everything = Payload("param", range(setting.buckets))
    message_s = setting.profile.message_s(everything, setting.profile.default_link.name)
    return max(setting.profile.slowest().compute_s, message_s / setting.period)


def delayed_choice(
    setting: Setting, delay: int, starts: Iterable[Candidate], *, simulated: bool
) -> Candidate:
    """Return the candidate with the shortest simulated iteration; candidates with more messages
    must gain `WORTH_MORE`.

    Candidates are runs of neighbouring buckets, sets of whole buckets with even loads, `starts`,
    and even loads with one bucket moved out of the heaviest set. Without `simulated`, return runs
    of neighbouring buckets, one per iteration.
    """
    pieces = whole_buckets(setting.buckets)
    message_s = [piece.seconds(setting.profile, setting.state) for piece in pieces]
    most = min(setting.period, setting.buckets)
    if not simulated:
        return neighbours(message_s, most, setting.period)

    def seconds(choice: Candidate) -> float:
        return steady_s(delayed_plan(setting, delay, choice), setting.profile)

    counts = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    together = (neighbours(message_s, count, setting.period) for count in counts)
    even = Candidate(pieces, even_loads(message_s, setting.period))
    moved = (Candidate(pieces, sets) for sets in _moved_sets(even.sets, message_s))
    best, best_s, least_s = even, float("inf"), setting.profile.slowest().compute_s
    for choice in chain(together, [even], starts, moved):
        if best_s <= least_s * (1 + WORTH_MORE):
            break
        if (found_s := seconds(choice)) < best_s * (1 - WORTH_MORE):
            best_s, best = found_s, choice
    return best


def neighbours(message_s: Sequence[float], count: int, period: int) -> Candidate:
    """Return `count` runs of neighbouring buckets of even size, one message each, spread over the
    period."""
    runs = cut(message_s, count)
    return Candidate([Piece(run) for run in runs], spread([(n,) for n in range(count)], period))


def spread(sets: Sequence[tuple[int, ...]], period: int) -> Sets:
    """Return the sets evenly spread over a longer period, with empty sets between them."""
    found: list[tuple[int, ...]] = [()] * period
    for n, members in enumerate(sets, 1):
        found[n * period // len(sets) - 1] = members
    return tuple(found)


def even_loads(message_s: Sequence[float], period: int) -> Sets:
    """Return sets of even load: the longest messages first, each to the set with the smallest
    load."""
    sets: list[list[int]] = [[] for _ in range(period)]
    loads_s = [0.0] * period
    for i in sorted(range(len(message_s)), key=lambda i: (-message_s[i], i)):
        h = min(range(period), key=lambda h: (loads_s[h], h))
        sets[h].append(i)
        loads_s[h] += message_s[i]
    return tuple(tuple(sorted(members)) for members in sets)


def _moved_sets(sets: Sets, message_s: Sequence[float]) -> Iterator[Sets]:
    """Yield variants of the sets: first in an order that alternates heavy and light iterations,
    then with one bucket of the heaviest set in another set."""
    period = len(sets)
    by_load = sorted(range(period), key=lambda h: (-sum(message_s[i] for i in sets[h]), h))
    half = (period + 1) // 2
    mixed = list(chain(*zip(by_load[:half], by_load[half:][::-1], strict=False)))
    mixed += [h for h in by_load if h not in mixed]
    yield tuple(sets[h] for h in mixed)
    heaviest = by_load[0]
    tried = 1
    for i in sets[heaviest]:
        for h in reversed(by_load[1:]):
            if tried == MOVES:
                return
            tried += 1
            changed = [set(members) for members in sets]
            changed[heaviest].remove(i)
            changed[h].add(i)
            yield tuple(tuple(sorted(members)) for members in changed)


def delayed_plan(setting: Setting, delay: int, choice: Candidate, *, early: bool = False) -> Plan:
    """Return a plan whose averages are applied at the forward after `delay` further iterations.

    Parameters are copied twice: after the step, or at their gradients with
    `average="before_update"`. One copy is averaged in place. The difference of both copies is added
    to the parameters. Deadlines are late enough for one optimizer step of all buckets, so clipping
    works and no bucket needs an optimizer call of its own. With `early`, each bucket is updated at
    its gradient, so that messages leave in backward with the same equations.
    """
    size, period = setting.buckets, setting.period
    after = setting.average == "after_update"
    early = early and after
    point = "grad" if early or not after else "step"
    updated = Moment("grad" if early else "step")
    transfers, applies = [], [local(size, updated, range(period))]
    kept = (("kept", round(1 - setting.gain, 12)),) if setting.gain < 1 else ()
    for h, members in enumerate(choice.sets):
        taken, applied = Phases((h,)), Phases(((h + delay) % period,))
        for piece in (choice.pieces[i] for i in members):
            last = piece.buckets[-1]
            transfers.append(
                transfer(
                    "average",
                    piece.buckets,
                    after=Moment(point, last) if point == "grad" else Moment(point),
                    before=Moment("forward", last, delay + 1),
                    phases=taken,
                    link=setting.profile.default_link.name,
                )
            )
            for target in ("snapshot", "average"):
                args = (("source", "param"), ("target", target))
                applies.append(Apply("copy", piece.buckets, Moment(point), taken, args=args))
            late = Moment("forward", lag=1)
            applies.append(Apply("delta", piece.buckets, late, applied, args=kept))
    everything = setting.profile.payload_bytes("param", range(size))
    facts = layer_set_facts(choice.sets, ((),) * period, choice.pieces)
    return Plan(
        setting.name,
        size,
        tuple(transfers),
        tuple(applies),
        buffers=(Buffer("snapshot"), Buffer("average")),
        period=period,
        facts=(*facts, *_cost_facts(2 * everything, delay)),
    )


def with_idle_steps(plan: Plan) -> Plan:
    """Return the plan with one update at the step in each iteration that sends nothing in backward.

    The numbers are the same, because no message holds the parameters in such an iteration.
    """
    busy = {p for t in plan.transfers if t.after.point == "grad" for p in t.phases}
    applies = []
    for apply in plan.applies:
        phases = set(apply.phases)
        if effects.is_update(apply) and apply.at.point == "grad" and phases - busy:
            idle = replace(apply, at=Moment("step"), phases=Phases(phases - busy))
            applies += [replace(apply, phases=Phases(phases & busy)), idle]
        else:
            applies.append(apply)
    return replace(plan, applies=tuple(applies))


# ---- comparison with the paper --------------------------------------------------------------


def with_costs(plan: Plan) -> Plan:
    """Return the paper's plan with facts of no staleness and no memory, to replace a slower
    plan."""
    return replace(plan, facts=(*plan.facts, *_cost_facts(0, 0)))


def faster_plan(plan: Plan, paper: Plan, profile: Profile) -> Plan:
    """Return `plan`, or the paper's plan with its facts if that is predicted to be faster."""
    seconds, paper_s = (predict_plan(one, profile).iteration_s for one in (plan, paper))
    return plan if seconds <= paper_s * (1 + ROUNDING) else with_costs(paper)


# ---- selection -------------------------------------------------------------------------------


def fastest(
    choices: Iterable[One], seconds: Callable[[One], float], gain: float = ROUNDING
) -> tuple[float, One]:
    """Return the shortest period in seconds and its choice; ties go to the first.

    A later choice must save the share `gain`, because smaller differences of simulated periods may
    be noise.
    """
    best_s, best = float("inf"), None
    for choice in choices:
        found_s = seconds(choice)
        if best is None or found_s < best_s * (1 - gain):
            best_s, best = found_s, choice
    assert best is not None
    return best_s, best


def steady_s(plan: Plan, profile: Profile) -> float:
    """Return the simulated seconds of one iteration in steady state, after messages of all
    iterations are in flight."""
    periods = max(4, -(-24 // plan.period))
    iterations = 2 * periods * plan.period
    trace = simulate(plan, profile, iterations=iterations, record=0)
    first = periods * plan.period - 1
    return max(ends[-1] - ends[first] for ends in trace.ends_s) / (periods * plan.period)
