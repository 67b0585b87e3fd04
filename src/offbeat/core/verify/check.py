"""Checks of plans: what is wrong with a plan, said before anything runs.

Names and numbers are looked at one by one. Everything else is found by executing the plan on
made-up numbers, a few workers and periods long: who touches what is in flight, who waits for
ever, whether all replicas end up with every gradient, once. So what `check` accepts has one
meaning.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from random import Random

import numpy as np

from offbeat.core.derive import effects
from offbeat.core.plan.phases import Phases
from offbeat.core.plan.program import Program
from offbeat.core.plan.types import Apply, Plan, Vote
from offbeat.core.profile import Profile
from offbeat.core.rules import SETTINGS, VOTES, Context, VoteRule
from offbeat.core.verify.interpreter import Array, ConflictError, Interpreter, Model
from offbeat.core.verify.shape import Rule, faults

MOST_SLICES = 4096  # of one bucket, in the sizes of all its messages together
TOLERANCE = 1e-9
BRISK = 1e-4  # to the power of three periods less than the tolerance
YES, NO, MIXED = 0, 1, 2  # what votes say
SAID = 10  # periods with mixed votes


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a plan. `rules` are those at fault; str() prints the plan with arrows."""

    message: str
    plan: Plan
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return f"{self.message}\n{self.plan.text(mark=self.rules)}"


def check(plan: Plan, profile: Profile | None = None) -> list[Problem]:
    """Everything that is wrong with a plan: all faulty names and numbers, else the first fault in
    what it does. With a profile also whether both fit together."""
    shape = [Problem(words, plan, rules) for words, rules in faults(plan, profile)]
    if shape:
        return shape  # nothing can be executed while names and numbers are wrong
    return list(_executed(plan, profile))[:1]


def raise_if_wrong(plan: Plan, profile: Profile | None = None) -> None:
    """ValueError with the first problem, if there is one."""
    problems = check(plan, profile)
    if problems:
        more = f"\n(and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the plan is wrong: {problems[0]}{more}")


def _executed(plan: Plan, profile: Profile | None) -> Iterator[Problem]:
    """What goes wrong when it runs."""
    short = shorten_phases(_brisk(plan))
    originals = dict(zip(_all_rules(short), _all_rules(plan), strict=True))
    sizes = slices_of(plan)
    for b, size in enumerate(sizes):
        if size > MOST_SLICES:
            yield Problem(f"bucket {b} is cut into slices of too many sizes", plan)
            return
    run = _Run(short, sizes, _ranks(plan, profile))
    try:
        with _uncollected():
            problems = list(_outcomes(run, plan))
        yield from problems
    except ConflictError as conflict:
        rules = tuple(originals.get(rule, rule) for rule in conflict.rules)
        yield Problem(str(conflict), plan, rules)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which takes half of the time among so many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _outcomes(run: _Run, plan: Plan) -> Iterator[Problem]:
    """Faults of what comes out. Votes say yes, no, or now this and now that."""
    yield from _replicas(run, plan)
    yield from _changed(run, plan)
    early = _early(run.ranks, plan) if _pends(plan) else []
    for say in (YES, NO, MIXED, MIXED + 1) if plan.votes else (YES,):
        ends = run.settled(say=say)
        for flushing in early:
            if not all(map(_equal, ends, run.settled(say=say, flushing=flushing))):
                yield Problem(
                    "what the next forward waits for changes what is sent before that wait, so a "
                    "rank that evaluates between iterations would train other weights; release "
                    "it after the wait",
                    plan,
                )
                return


@dataclass
class _Run:
    """A plan executed until everything has happened once, then without gradients until nothing
    moves."""

    plan: Plan
    sizes: Sequence[int]
    ranks: int

    def __post_init__(self) -> None:
        plan, rng = self.plan, np.random.default_rng(0)
        self.lag = Program(plan).lag
        self.active = plan.prologue + plan.period + self.lag
        # What was added up to late is applied when the next window closes: a period more.
        self.late = any(map(effects.is_window_end, plan.applies))
        self.start = rng.normal(size=sum(self.sizes))
        self.sources = rng.normal(size=(self.ranks, self.active, sum(self.sizes)))
        self.offsets = [0, *accumulate(self.sizes)]
        self._known: dict[object, list[Array]] = {}

    @property
    def moved(self) -> Array:
        """The weights after every gradient, averaged over ranks, was applied once."""
        return self.start - self.sources.mean(axis=0).sum(axis=0)

    def settled(
        self,
        *,
        say: int = YES,
        flushing: Collection[int] = (),
        periods: int = 1,
        still: bool = False,
    ) -> list[Array]:
        """Weights that the last forward of every rank has used; `still`: all gradients are 0."""
        key = say, tuple(flushing), periods, still
        if key not in self._known:
            self._known[key] = self._settled(*key)
        return self._known[key]

    def _settled(
        self, say: int, flushing: Collection[int], periods: int, still: bool
    ) -> list[Array]:
        sources = np.zeros_like(self.sources) if still else self.sources

        def gradient(rank: int, iteration: int, run: range, weights: Array) -> Array:
            if iteration >= self.active and say < MIXED:
                return np.zeros_like(weights)
            return sources[
                rank, iteration % self.active, self.offsets[run.start] : self.offsets[run.stop]
            ]

        model = Model(self.sizes, self.start, gradient, merges_by_mean=False)
        interpreter = Interpreter(
            self.plan,
            model,
            self.ranks,
            votes={name: _says(rule, say) for name, rule in VOTES.items()},
            exact=True,
            flushing=flushing,
        )
        if say >= MIXED:
            periods = SAID  # gradients never stop, so that votes differ where that matters
        more = (periods + self.late) * self.plan.period + 2 * self.lag + 1
        interpreter.run(self.active + more)
        return [worker.seen for worker in interpreter.workers]


def _says(rule: VoteRule, say: int) -> VoteRule:
    """The same for all ranks. The rule is asked too: it reads what it reads."""
    asked: dict[tuple[str, int], int] = defaultdict(int)

    def answer(context: Context, vote: Vote, buckets: range) -> bool:
        rule(context, vote, buckets)
        if say in (YES, NO):
            return say == YES
        asked[vote.name, context.rank] += 1
        return Random(f"{vote.name} {say} {asked[vote.name, context.rank]}").random() < 0.5

    return answer


def _early(ranks: int, plan: Plan) -> list[Collection[int]]:
    """Sets of ranks that finish early what the next forward waits for, so that of any two ranks
    that are not alike each does so without the other."""
    if plan.uniform:
        return [(0,)]
    bits = range(max(ranks - 1, 1).bit_length())
    return [[r for r in range(ranks) if (r >> bit & 1) == on] for bit in bits for on in (0, 1)]


def _replicas(run: _Run, plan: Plan) -> Iterator[Problem]:
    """After the gradients have stopped all replicas are equal, and hold every gradient once."""
    if _apart(run, plan, run.settled()) is None:
        return
    # What is under way for longer than a period takes longer to settle.
    fault = _apart(run, plan, run.settled(periods=3))
    if fault is not None:
        yield Problem(fault, plan)


def _changed(run: _Run, plan: Plan) -> Iterator[Problem]:
    """Whatever the rules, without gradients nobody's weights change."""
    if all(map(effects.conserves_gradients, plan.applies)):
        return
    for end in run.settled(still=True):
        odd = np.flatnonzero(~np.isclose(end, run.start, rtol=0, atol=TOLERANCE))
        if odd.size:
            bucket = next(b for b in range(plan.buckets) if run.offsets[b + 1] > odd[0])
            yield Problem(f"the weights of bucket {bucket} change without any gradient", plan)
            return


def _apart(run: _Run, plan: Plan, ends: Sequence[Array]) -> str | None:
    bucket_of = np.repeat(np.arange(plan.buckets), run.sizes)
    for end in ends[1:]:
        odd = np.flatnonzero(~np.isclose(ends[0], end, rtol=0, atol=TOLERANCE))
        if odd.size:
            bucket = int(bucket_of[odd[0]])
            some = int((bucket_of[odd] == bucket).sum()) < run.sizes[bucket]
            what = "only averaged in part" if some else "not averaged in every iteration, nor later"
            if not any(bucket in t.payload.buckets for t in plan.transfers):
                what = "never moved"
            return f"bucket {bucket} is {what}, so its replicas drift apart"
    lost = ~np.isclose(ends[0], run.moved, rtol=0, atol=TOLERANCE)
    for apply in plan.applies:
        if not effects.conserves_gradients(apply):
            lost[run.offsets[apply.buckets.start] : run.offsets[apply.buckets.stop]] = False
    if not lost.any():
        return None
    bucket = int(bucket_of[np.flatnonzero(lost)[0]])
    return (
        f"bucket {bucket} does not get every gradient once: some are applied twice, late for "
        "ever, or never"
    )


def _equal(a: Array, b: Array) -> bool:
    return bool(np.allclose(a, b, rtol=0, atol=TOLERANCE))


def _pends(plan: Plan) -> bool:
    """Whether the next forward waits for or applies something of this iteration."""
    moments = [t.before for t in plan.transfers] + [a.at for a in plan.applies]
    return any(moment.point == "forward" and moment.lag for moment in moments)


def _ranks(plan: Plan, profile: Profile | None) -> int:
    """Workers that show everything: two where all do the same, else all."""
    weighted = [len(value) - 1 for apply in plan.applies for value in _per_rank(apply)]
    if plan.uniform and not weighted:
        return 2
    named = [rank for rule in (*plan.transfers, *plan.applies) for rank in rule.ranks or ()]
    grouped = [rank for groups in plan.groups.values() for group in groups for rank in group]
    least = 1 + max([1, *named, *grouped, *weighted])
    return max(least, profile.world_size) if profile is not None else least


def _per_rank(apply: Apply) -> Iterator[tuple[float, ...]]:
    """Settings with one number per rank."""
    for name, value in apply.args:
        if SETTINGS[apply.rule][name].what == "numbers":
            yield value


def slices_of(plan: Plan) -> list[int]:
    """Elements of each bucket that make every slice of it a whole number of them; halves of an
    all-reduce cut it again."""
    sizes = [1] * plan.buckets
    for t in plan.transfers:
        shards = 2 if t.verb in ("reduce_scatter", "all_gather") else 1
        for b in t.payload.buckets:
            sizes[b] = lcm(sizes[b], t.payload.parts * shards)
    return sizes


def _brisk(plan: Plan) -> Plan:
    """The same plan with little left of what is blended: replicas that come nearer by a share per
    period would take long to be equal."""

    return replace(plan, applies=tuple(effects.with_smaller_share(a, BRISK) for a in plan.applies))


def shorten_phases(plan: Plan) -> Plan:
    """The same plan with every long run of equal iterations cut short."""
    program = Program(plan)
    _, edges = program.shape()
    keep = 3 * program.lag + 4
    bounds = [*edges, len(plan.phases)] if edges[-1] < len(plan.phases) else edges
    starts = {bounds[0]: 0}
    for a, z in pairwise(bounds):
        starts[z] = starts[a] + min(z - a, keep)
    if starts[bounds[-1]] == len(plan.phases):
        return plan

    def cut(phases: Phases) -> Phases:
        return Phases.of_runs((starts[a], starts[z]) for a, z in phases.runs)

    prologue = starts[plan.prologue]
    return replace(
        plan,
        transfers=tuple(replace(t, phases=cut(t.phases)) for t in plan.transfers),
        applies=tuple(replace(a, phases=cut(a.phases)) for a in plan.applies),
        votes=tuple(replace(v, phases=cut(v.phases)) for v in plan.votes),
        prologue=prologue,
        period=starts[len(plan.phases)] - prologue,
    )


def _all_rules(plan: Plan) -> list[Rule]:
    return [*plan.transfers, *plan.applies, *plan.votes]
