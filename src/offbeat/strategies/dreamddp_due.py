"""DreamDDP beyond the paper: averages that also hide behind the forward pass.

`forward`: a piece's average is due at its own next forward. Nothing else changes: it trains what
the paper's variant trains with the same sets. `delayed`: a snapshot is averaged while training
goes on, and lands some iterations later as `w += mean(snapshot) - snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

from offbeat.core.plan import Apply, Buffer, Fact, Moment, Payload, Phases, Plan, local, transfer
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan, simulate
from offbeat.core.strategy.interface import StatePolicy
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.partial_sync import Average, Piece, kinds_of, sets_facts, whole
from offbeat.strategies.solvers import Sets
from offbeat.strategies.solvers.due import MOST_WORK, Cycle, Orders, Work, due_sets, filled, greedy
from offbeat.strategies.solvers.stages import cut

CLIMBED = 2  # of the ways to cut buckets into slices, so many are looked at closely
MOST_CLIMBED = 400  # pieces; of more the greedy sets have to do
SEARCHES_WORK = 1_000_000  # of all searches for sets together: see `due_sets`
MOVES = 24  # sets of a delayed plan that are tried by simulation
WORTH_MORE = 0.005  # what other sets, of more messages mostly, must save of a delayed plan
ROUNDING = 1e-9


@dataclass(frozen=True)
class Setting:
    """What both planners are told: whose plan it is, and how it averages."""

    name: str
    profile: Profile
    period: int
    average: Average
    state: StatePolicy

    @property
    def buckets(self) -> int:
        return len(self.profile.buckets)


class Candidate(NamedTuple):
    """Pieces, which of them each iteration averages, and which of those once more (`fill`).

    `cost_s`: seconds of a period without its forward passes. `at_step`: update and average as local
    SGD does, in one step of all and not bucket by bucket.
    """

    pieces: list[Piece]
    sets: Sets
    fill: Sets = ()
    cost_s: float = 0.0
    at_step: bool = False


class Choice(NamedTuple):
    """Pieces, which of them each iteration sends in which order, and which of those once more.

    `closed_s`: seconds of a period of steady ranks. `at_step`: as local SGD, in one step of all.
    """

    pieces: list[Piece]
    orders: Orders
    fill: Sets
    closed_s: float
    at_step: bool = False


# ---- due at the next forward ----------------------------------------------------------------


def forward_cycle(setting: Setting, pieces: Sequence[Piece], *, single: bool = True) -> Cycle:
    """One iteration as the slowest rank sees it, from bucket 0's forward to the next. `single`:
    buckets are stepped one by one, and pay for it."""
    slowest, early = setting.profile.slowest(), setting.average == "after_update"
    update_s = slowest.bucket_step_s if single else slowest.bucket_update_s
    times = [(b.forward_s, b.backward_s) for b in slowest.buckets]
    # The update belongs to the backward, or to the forward that it waits for an average with.
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


def forward_bound_s(setting: Setting) -> float:
    """No plan of this kind takes less per iteration: `solve.due.bound_s`, where the messages of
    buckets k.. are one message of them all, and the optimizer one call."""
    cycle = forward_cycle(setting, whole(setting.buckets), single=False)
    link = setting.profile.default_link.name
    later_s = setting.profile.messages_ending_s(link, "param", 0, setting.buckets)
    # Without an update in backward it may also come at once at the step.
    heads = zip(cycle.ready_s, later_s.tolist(), cycle.left_s, strict=True)
    return max(cycle.least_s, *(r + c / setting.period + q for r, c, q in heads))


def forward_choices(
    setting: Setting, start: Candidate, cuts: Iterable[frozenset[int]], *, search: bool
) -> Iterator[Choice]:
    """What to choose from: the paper's variant (`start`) with later deadlines; its sets in their
    best order; with `search` also better sets of the same pieces, of whole buckets, and of the
    buckets in `cuts` in slices."""
    pieces, sets = start.pieces, start.sets
    if start.at_step:
        yield _at_step(setting, pieces)
        pieces = whole(setting.buckets)
    else:
        yield _as_it_is(setting, start)
        yield _ordered(setting, pieces, sets)
    if not search:
        return
    # Pieces and starts of each search; all of them share the work.
    searches = [(pieces, [] if start.at_step else [sets])]
    if any(piece.parts > 1 or len(piece.buckets) > 1 for piece in pieces):
        searches.append((whole(setting.buckets), []))
    rough: list[tuple[float, int, list[Piece]]] = []
    for n, sliced in enumerate(cuts):
        pieces = cut_into(sliced, setting)
        cycle = forward_cycle(setting, pieces)
        tried = greedy(cycle, setting.period), _evenly(pieces, setting.period)
        seconds = min(sum(cycle.best(members)[0] for members in one) for one in tried)
        rough.append((seconds, n, pieces))
    for _, _, pieces in sorted(rough, key=lambda one: one[:2])[:CLIMBED]:
        searches.append((pieces, [_evenly(pieces, setting.period)]))
    left = SEARCHES_WORK
    for n, (pieces, starts) in enumerate(searches):
        given = min(MOST_WORK, left // (len(searches) - n))
        work = Work(given)
        yield _searched(setting, pieces, starts, work)
        left -= given - max(work.left, 0)


def _as_it_is(setting: Setting, start: Candidate) -> Choice:
    cycle = forward_cycle(setting, start.pieces)
    both = zip(start.sets, start.fill, strict=True)
    orders = tuple(tuple(sorted(chain(*members))) for members in both)
    return Choice(start.pieces, orders, start.fill, sum(map(cycle.seconds, orders)))


def _ordered(setting: Setting, pieces: list[Piece], sets: Sets) -> Choice:
    cycle = forward_cycle(setting, pieces)
    found = [cycle.best(members) for members in sets]
    orders = tuple(order for _, order in found)
    return Choice(pieces, orders, ((),) * setting.period, sum(seconds for seconds, _ in found))


def _searched(setting: Setting, pieces: list[Piece], starts: list[Sets], work: Work) -> Choice:
    cycle = forward_cycle(setting, pieces)
    if len(pieces) <= MOST_CLIMBED:
        return _ordered(setting, pieces, due_sets(cycle, setting.period, starts, work))
    tried = [_ordered(setting, pieces, s) for s in (*starts, greedy(cycle, setting.period))]
    return min(tried, key=lambda choice: choice.closed_s)


def _at_step(setting: Setting, pieces: list[Piece]) -> Choice:
    """All at once as in local SGD: hidden behind what comes before the next forward."""
    other_s = setting.profile.slowest().other_s
    message_s = sum(piece.seconds(setting.profile, setting.state) for piece in pieces)
    closed_s = setting.period * _compute_s(setting) + max(message_s - other_s, 0.0)
    none: Sets = ((),) * setting.period
    return Choice(pieces, (*none[1:], tuple(range(len(pieces)))), none, closed_s, at_step=True)


def cut_into(sliced: frozenset[int], setting: Setting) -> list[Piece]:
    """The buckets in `sliced` in one slice per iteration, the others whole."""
    pieces: list[Piece] = []
    for one in whole(setting.buckets):
        parts = setting.period if one.buckets[0] in sliced else 1
        pieces += [Piece(one.buckets, part, parts) for part in range(parts)]
    return pieces


def _evenly(pieces: Sequence[Piece], period: int) -> Sets:
    """Each slice in an iteration of its own; whole buckets in turn."""
    sets: list[list[int]] = [[] for _ in range(period)]
    for i, piece in enumerate(pieces):
        sets[(piece.part if piece.parts > 1 else piece.buckets[0]) % period].append(i)
    return tuple(map(tuple, sets))


def with_fill(setting: Setting, choice: Choice) -> Choice:
    """The same, and whatever more an iteration can send in the same time."""
    if choice.at_step or any(choice.fill):
        return choice
    cycle = forward_cycle(setting, choice.pieces)
    fill = filled(cycle, choice.orders)
    both = zip(choice.orders, fill, strict=True)
    orders = tuple(cycle.best((*own, *more))[1] if more else own for own, more in both)
    return choice._replace(orders=orders, fill=fill)


def forward_plan(setting: Setting, choice: Choice) -> Plan:
    """Messages released as in the paper's variant, each due at its bucket's next forward."""
    pieces, size = choice.pieces, setting.buckets
    if choice.at_step:
        return _later_local_sgd(setting, choice)
    early = setting.average == "after_update"
    transfers, applies = [], []
    for h, order in enumerate(choice.orders):
        for i in order:
            last = pieces[i].buckets[-1]
            next_ = Moment("forward", last, 1)
            transfers += [
                transfer(
                    kind,
                    pieces[i].buckets,
                    after=Moment("grad", last),
                    before=next_,
                    phases=(h,),
                    link=setting.profile.default_link.name,
                    part=pieces[i].part,
                    parts=pieces[i].parts,
                )
                for kind in kinds_of(setting.state)
            ]
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


def _later_local_sgd(setting: Setting, choice: Choice) -> Plan:
    plan = LocalSGD(setting.period, state=setting.state).schedule(setting.profile)
    # The message is of all buckets, so it is due when the first of them is needed.
    due = Moment("forward", setting.buckets - 1, 1)
    transfers = tuple(replace(t, before=due) for t in plan.transfers)
    return replace(plan, strategy=setting.name, transfers=transfers, facts=_forward_facts(choice))


def _forward_facts(choice: Choice) -> tuple[Fact, ...]:
    both = zip(choice.orders, choice.fill, strict=True)
    sets = tuple(tuple(sorted(set(order) - set(more))) for order, more in both)
    return (*sets_facts(sets, choice.fill, choice.pieces), *_costs(0, 0))


def _costs(memory_bytes: int, staleness: int) -> tuple[Fact, ...]:
    """What hiding costs beside the paper's variant."""
    return (
        Fact("memory_bytes", memory_bytes, "further buffers on every rank"),
        Fact("staleness", staleness, "iterations that train without an average that has begun"),
    )


# ---- delayed --------------------------------------------------------------------------------


def delayed_bound_s(setting: Setting) -> float:
    """`max(F + B, C / H)` with the update: each rank computes all of it in every iteration, and
    the link carries everything once per period. Delays hide the rest if they are long enough."""
    everything = Payload("param", range(setting.buckets))
    message_s = setting.profile.message_s(everything, setting.profile.default_link.name)
    return max(_compute_s(setting), message_s / setting.period)


def _compute_s(setting: Setting) -> float:
    """What an iteration takes without any message, the optimizer called once."""
    slowest = setting.profile.slowest()
    return slowest.other_s + slowest.forward_s + slowest.backward_s + slowest.update_s


def delayed_choice(
    setting: Setting, delay: int, starts: Iterable[Candidate], *, simulated: bool
) -> Candidate:
    """What leaves little to wait for, in few messages: neighbours that travel together, in as few
    runs as take no longer; whole buckets, loads as even as they come; some `starts`, and what a
    few moves from the heaviest set make of even loads; all compared by simulation."""
    pieces = whole(setting.buckets)
    message_s = [piece.seconds(setting.profile, setting.state) for piece in pieces]
    most = min(setting.period, setting.buckets)
    if not simulated:
        return neighbours(message_s, most, setting.period)

    def seconds(choice: Candidate) -> float:
        return steady_s(delayed_plan(setting, delay, choice), setting.profile)

    counts = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    together = (neighbours(message_s, count, setting.period) for count in counts)
    even = Candidate(pieces, even_loads(message_s, setting.period))
    moved = (Candidate(pieces, sets) for sets in _moves(even.sets, message_s))
    best, best_s, least_s = even, float("inf"), _compute_s(setting)
    for choice in chain(together, [even], starts, moved):
        if best_s <= least_s * (1 + WORTH_MORE):
            break
        if (found_s := seconds(choice)) < best_s * (1 - WORTH_MORE):
            best_s, best = found_s, choice
    return best


def neighbours(message_s: Sequence[float], count: int, period: int) -> Candidate:
    """So many runs of neighbouring buckets, as even as can be, each one message, spread over the
    period."""
    runs = cut(message_s, count)
    sets: list[tuple[int, ...]] = [()] * period
    for n in range(count):
        sets[(n + 1) * period // count - 1] = (n,)
    return Candidate([Piece(run) for run in runs], tuple(sets))


def even_loads(message_s: Sequence[float], period: int) -> Sets:
    """The longest messages first, each to the set that has least to send."""
    sets: list[list[int]] = [[] for _ in range(period)]
    loads_s = [0.0] * period
    for i in sorted(range(len(message_s)), key=lambda i: (-message_s[i], i)):
        h = min(range(period), key=lambda h: (loads_s[h], h))
        sets[h].append(i)
        loads_s[h] += message_s[i]
    return tuple(tuple(sorted(members)) for members in sets)


def _moves(sets: Sets, message_s: Sequence[float]) -> Iterator[Sets]:
    """The sets in another order, so that light iterations follow heavy ones; then with one bucket
    of the heaviest set in another one."""
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


def delayed_plan(setting: Setting, delay: int, choice: Candidate) -> Plan:
    """Parameters are copied twice, after the step or, before it, at their gradients. One copy is
    averaged, in place, and lands at the forward `delay` iterations after the next. As there is time
    enough, the optimizer steps once for all: clipping works, no bucket pays for a call of its own.
    """
    size, period = setting.buckets, setting.period
    after = setting.average == "after_update"
    transfers, applies = [], [local(size, Moment("step"), range(period))]
    for h, members in enumerate(choice.sets):
        taken, landing = Phases((h,)), Phases(((h + delay) % period,))
        for piece in (choice.pieces[i] for i in members):
            last = piece.buckets[-1]
            transfers.append(
                transfer(
                    "average",
                    piece.buckets,
                    after=Moment("step") if after else Moment("grad", last),
                    before=Moment("forward", last, delay + 1),
                    phases=taken,
                    link=setting.profile.default_link.name,
                )
            )
            for target in ("snapshot", "average"):
                args = (("source", "param"), ("target", target))
                at = Moment("step" if after else "grad")
                applies.append(Apply("copy", piece.buckets, at, taken, args=args))
            applies.append(Apply("delta", piece.buckets, Moment("forward", lag=1), landing))
    everything = setting.profile.payload_bytes("param", range(size))
    facts = sets_facts(choice.sets, ((),) * period, choice.pieces)
    return Plan(
        setting.name,
        size,
        tuple(transfers),
        tuple(applies),
        buffers=(Buffer("snapshot"), Buffer("average")),
        period=period,
        facts=(*facts, *_costs(2 * everything, delay)),
    )


# ---- what is extended ------------------------------------------------------------------------


def extended(plan: Plan) -> Plan:
    """The paper's variant in place of one that would be slower: nothing is late, nothing copied."""
    return replace(plan, facts=(*plan.facts, *_costs(0, 0)))


def no_slower(plan: Plan, paper: Plan, profile: Profile) -> Plan:
    """A plan, or the paper's variant that it extends where that is predicted to be faster."""
    seconds, paper_s = (predict_plan(one, profile).iteration_s for one in (plan, paper))
    return plan if seconds <= paper_s * (1 + ROUNDING) else extended(paper)


# ---- choosing -------------------------------------------------------------------------------


def fastest(
    choices: Iterable[Choice], seconds: Callable[[Choice], float], gain: float = ROUNDING
) -> Choice:
    """The one with the shortest period, the first of those as fast. A later one must save the
    share `gain`: that much may be chance where periods are simulated."""
    best_s, best = float("inf"), None
    for choice in choices:
        found_s = seconds(choice)
        if best is None or found_s < best_s * (1 - gain):
            best_s, best = found_s, choice
    assert best is not None
    return best


def steady_s(plan: Plan, profile: Profile) -> float:
    """Simulated seconds of one iteration once messages of all iterations are under way."""
    periods = max(4, -(-24 // plan.period))
    iterations = 2 * periods * plan.period
    trace = simulate(plan, profile, iterations=iterations, record=0)
    first = periods * plan.period - 1
    return max(ends[-1] - ends[first] for ends in trace.ends_s) / (periods * plan.period)
