"""Check of a plan: find its errors before it runs.

`shape` checks each name and number. The remaining errors are found by executing the plan on
synthetic numbers with a few workers for a few periods: an access to a payload in flight, a wait
that never ends, replicas that differ, a gradient that is lost or applied twice. A plan that `check`
accepts has one meaning, whatever the order in which its messages complete.
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
from offbeat.core.derive.fit import Rule
from offbeat.core.plan.program import Program, move_bounds
from offbeat.core.plan.types import Plan, Vote
from offbeat.core.profile import Profile
from offbeat.core.rules import VOTES, Context, VoteRule
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.pairs import FewRanks, on_few_ranks
from offbeat.core.verify.shape import faults
from offbeat.core.verify.worker import Array, ConflictError, InterpretedModel

MAX_SLICES = 4096  # largest number of elements of one bucket (see `slices_of`)
TOLERANCE = 1e-9
SHARE = 1e-4  # factor on blend shares: its cube is far below TOLERANCE
SHRINKS = 0.1  # largest ratio of the differences between replicas, `patience` periods later
YES, NO, MIXED = 0, 1, 2  # outcome of all votes
MIXED_PERIODS = 10  # periods to execute with mixed votes
MOST_EXECUTED = 8  # ranks of a plan of pairs up to which all are executed


@dataclass(frozen=True, slots=True)
class Problem:
    """An error of a plan. `str()` returns the message and the plan, with arrows at the rules at
    fault.

    Attributes:
        message: description of the error.
        plan: the plan that was checked.
        rules: rules that cause the error; empty if the error concerns the whole plan.
    """

    message: str
    plan: Plan
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return f"{self.message}\n{self.plan.text(mark=self.rules)}"


def check(plan: Plan, profile: Profile | None = None) -> list[Problem]:
    """Return the problems of a plan.

    Args:
        plan: plan to check.
        profile: profile of the model and cluster. If given, the plan must also fit the profile:
            buckets, links, ranks.

    Returns:
        All problems of names and numbers. If there is none, the first problem found by
        executing the plan, as a list of length 0 or 1.
    """
    shape = [Problem(words, plan, rules) for words, rules in faults(plan, profile)]
    if shape:
        return shape  # a plan with a wrong name or number cannot be executed
    return list(_execution_problems(plan, profile))[:1]


def raise_if_wrong(plan: Plan, profile: Profile | None = None) -> None:
    """Raise if a plan has a problem.

    Args:
        plan: plan to check.
        profile: profile that the plan must fit, or None.

    Raises:
        ValueError: `check` reports a problem. The message states the first problem and the
            number of further problems.
    """
    problems = check(plan, profile)
    if problems:
        more = f"\n(and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the plan is wrong: {problems[0]}{more}")


def _execution_problems(plan: Plan, profile: Profile | None) -> Iterator[Problem]:
    """Yield the problems found by executing a shortened form of the plan.

    A plan of pairs of more than `MOST_EXECUTED` ranks is executed on few ranks.
    """
    whole, ranks = plan, _worker_count(plan, profile)
    few = on_few_ranks(plan, ranks) if ranks > MOST_EXECUTED else None
    if few is not None:
        yield from _mixing_problems(few, plan, ranks)
        whole, ranks = few.plan, few.ranks
    short = shorten_phases(_speed_up_blends(whole))
    originals: dict[Rule, Rule] = dict(zip(_all_rules(short), _all_rules(whole), strict=True))
    if few is not None:
        originals = {rule: few.originals.get(one, one) for rule, one in originals.items()}
    sizes = slices_of(plan)
    for b, size in enumerate(sizes):
        if size > MAX_SLICES:
            yield Problem(
                f"least common multiple of the parts of bucket {b} ({size}) must be at most "
                f"{MAX_SLICES}; cut the bucket into the same parts in all transfers",
                plan,
            )
            return
    run = _Execution(short, sizes, ranks, 2 if few is None else few.periods)
    try:
        with _pause_gc():
            problems = list(_weight_problems(run, plan))
        yield from problems
    except ConflictError as conflict:
        rules = tuple(originals.get(rule, rule) for rule in conflict.rules)
        yield Problem(str(conflict), plan, rules)


def _mixing_problems(few: FewRanks, plan: Plan, ranks: int) -> Iterator[Problem]:
    """Yield a problem if pairs leave differences between replicas, as `_approach` of all ranks
    would find."""
    if few.exchanged and few.remaining_share(ranks, 2) > SHRINKS:
        yield Problem(
            f"bucket {min(few.exchanged)} is exchanged by pairs that leave more than "
            f"{SHRINKS:.0%} of the differences between {ranks} ranks after two periods, so its "
            "replicas drift apart; pair the ranks anew in more iterations",
            plan,
        )


@contextmanager
def _pause_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector. It would take half of the time, because the
    interpreter creates many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _weight_problems(run: _Execution, plan: Plan) -> Iterator[Problem]:
    """Yield the problems of the final weights, for votes that are all yes, all no, or mixed."""
    yield from _replica_problems(run, plan)
    yield from _drift_problems(run, plan)
    early = _flushing_sets(run.ranks, plan) if _has_pending_rules(plan) else []
    for say in (YES, NO, MIXED, MIXED + 1) if plan.votes else (YES,):
        ends = run.final_weights(say=say)
        for flushing in early:
            if not all(map(_are_equal, ends, run.final_weights(say=say, flushing=flushing))):
                yield Problem(
                    "a wait of the next forward changes a payload that is released before it, so a "
                    "rank that evaluates between iterations would train other weights; release "
                    "the payload after the wait",
                    plan,
                )
                return


@dataclass
class _Execution:
    """Execution of a plan on synthetic gradients.

    Gradients are random for the first `active` iterations, which contain every phase. They are zero
    in the following iterations, until the weights no longer change. Differences between replicas
    must shrink within `patience` periods.
    """

    plan: Plan
    sizes: Sequence[int]
    ranks: int
    patience: int = 2

    def __post_init__(self) -> None:
        plan, rng = self.plan, np.random.default_rng(0)
        self.lag = Program(plan).lag
        self.active = plan.prologue + plan.period + self.lag
        self.start = rng.normal(size=sum(self.sizes))
        self.sources = rng.normal(size=(self.ranks, self.active, sum(self.sizes)))
        self.offsets = [0, *accumulate(self.sizes)]
        self._known: dict[object, list[Array]] = {}

    @property
    def expected_weights(self) -> Array:
        """Return the initial weights minus the sum of all gradients, averaged over ranks."""
        return self.start - self.sources.mean(axis=0).sum(axis=0)

    def final_weights(
        self,
        *,
        say: int = YES,
        flushing: Collection[int] = (),
        periods: int = 1,
        still: bool = False,
    ) -> list[Array]:
        """Return the weights that the last forward of each rank has used.

        Args:
            say: outcome of all votes: `YES`, `NO`, or at least `MIXED` for random votes.
            flushing: ranks that complete the waits of the next forward early.
            periods: number of periods after the last gradient.
            still: whether all gradients are 0.
        """
        key = say, tuple(flushing), periods, still
        if key not in self._known:
            self._known[key] = self._execute(*key)
        return self._known[key]

    def _execute(
        self, say: int, flushing: Collection[int], periods: int, still: bool
    ) -> list[Array]:
        sources = np.zeros_like(self.sources) if still else self.sources

        def gradient(rank: int, iteration: int, run: range, weights: Array) -> Array:
            if iteration >= self.active and say < MIXED:
                return np.zeros_like(weights)
            return sources[
                rank, iteration % self.active, self.offsets[run.start] : self.offsets[run.stop]
            ]

        model = InterpretedModel(self.sizes, self.start, gradient, merges_by_mean=False)
        interpreter = Interpreter(
            self.plan,
            model,
            self.ranks,
            votes={name: _forced_vote(rule, say) for name, rule in VOTES.items()},
            exact=True,
            flushing=flushing,
        )
        if say >= MIXED:
            periods = MIXED_PERIODS  # gradients never become 0, so votes always matter
        more = periods * self.plan.period + 2 * self.lag + 1
        interpreter.run(self.active + more)
        return [worker.seen for worker in interpreter.workers]


def _forced_vote(rule: VoteRule, say: int) -> VoteRule:
    """Return a vote rule with a fixed outcome (`YES`, `NO`) or a pseudorandom one for each rank.

    The original rule is called too, so that its reads are checked.
    """
    asked: dict[tuple[str, int], int] = defaultdict(int)

    def answer(context: Context, vote: Vote, buckets: range) -> bool:
        rule(context, vote, buckets)
        if say in (YES, NO):
            return say == YES
        asked[vote.name, context.rank] += 1
        return Random(f"{vote.name} {say} {asked[vote.name, context.rank]}").random() < 0.5

    return answer


def _flushing_sets(ranks: int, plan: Plan) -> list[Collection[int]]:
    """Return sets of ranks that complete the waits of the next forward early.

    For every ordered pair of ranks, one set contains the first rank but not the second.
    """
    if plan.uniform:
        return [(0,)]
    bits = range(max(ranks - 1, 1).bit_length())
    return [[r for r in range(ranks) if (r >> bit & 1) == on] for bit in bits for on in (0, 1)]


def _replica_problems(run: _Execution, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the final weights differ between ranks or miss a gradient."""
    if _replica_fault(run, plan, run.final_weights()) is None:
        return
    # A plan with messages in flight for more than one period needs more periods.
    ends = run.final_weights(periods=1 + run.patience)
    fault = _replica_fault(run, plan, ends)
    if fault is not None and not _approach(run.final_weights(), ends, run, plan):
        yield Problem(fault, plan)


def _approach(before: Sequence[Array], ends: Sequence[Array], run: _Execution, plan: Plan) -> bool:
    """Return whether the differences between replicas shrink: averages of pairs of ranks never make
    all replicas equal. Plans that only use collectives or conserve gradients must end equal."""
    if not any(t.ranks is not None for t in plan.transfers):
        return False
    if all(map(effects.conserves_gradients, plan.applies)):
        return False
    for bucket in range(plan.buckets):
        part = slice(run.offsets[bucket], run.offsets[bucket + 1])
        first, last = (np.ptp(np.stack(one)[:, part], axis=0).max() for one in (before, ends))
        if last > max(SHRINKS * first, TOLERANCE):
            return False
    return True


def _drift_problems(run: _Execution, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if weights change although all gradients are 0."""
    if all(map(effects.conserves_gradients, plan.applies)):
        return
    for end in run.final_weights(still=True):
        odd = np.flatnonzero(~np.isclose(end, run.start, rtol=0, atol=TOLERANCE))
        if odd.size:
            bucket = next(b for b in range(plan.buckets) if run.offsets[b + 1] > odd[0])
            yield Problem(f"the weights of bucket {bucket} change without any gradient", plan)
            return


def _replica_fault(run: _Execution, plan: Plan, ends: Sequence[Array]) -> str | None:
    """Return the error message for final weights that differ or miss a gradient, or None."""
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
    lost = ~np.isclose(ends[0], run.expected_weights, rtol=0, atol=TOLERANCE)
    for apply in plan.applies:
        if not effects.conserves_gradients(apply):
            lost[run.offsets[apply.buckets.start] : run.offsets[apply.buckets.stop]] = False
    if not lost.any():
        return None
    bucket = int(bucket_of[np.flatnonzero(lost)[0]])
    return (
        f"bucket {bucket} must get every gradient exactly once: some are applied twice, always "
        "late, or never"
    )


def _are_equal(a: Array, b: Array) -> bool:
    return bool(np.allclose(a, b, rtol=0, atol=TOLERANCE))


def _has_pending_rules(plan: Plan) -> bool:
    """Return whether a message or an apply of an iteration is due at the next forward."""
    moments = [t.before for t in plan.transfers] + [a.at for a in plan.applies]
    return any(moment.point == "forward" and moment.lag for moment in moments)


def _worker_count(plan: Plan, profile: Profile | None) -> int:
    """Return the number of workers to execute: 2 if all ranks have the same rules, or 1 if a plan
    of replicas has only one; otherwise every rank that the plan or the profile names."""
    weighted = [
        len(value) - 1 for apply in plan.applies for value in effects.per_rank_settings(apply)
    ]
    grouped = [rank for groups in plan.groups.values() for group in groups for rank in group]
    if plan.uniform and not weighted:
        return min(2, 1 + max(grouped, default=1))
    named = [rank for rule in (*plan.transfers, *plan.applies) for rank in rule.ranks or ()]
    least = 1 + max([1, *named, *grouped, *weighted])
    return max(least, profile.world_size) if profile is not None else least


def slices_of(plan: Plan) -> list[int]:
    """Return for each bucket the number of elements that makes all its slices equally large.

    It is the least common multiple of the numbers of slices. A reduce_scatter or an all_gather cuts
    each slice into two shards.
    """
    sizes = [1] * plan.buckets
    for t in plan.transfers:
        shards = 2 if t.verb in ("reduce_scatter", "all_gather") else 1
        for b in t.payload.buckets:
            sizes[b] = lcm(sizes[b], t.payload.parts * shards)
    return sizes


def _speed_up_blends(plan: Plan) -> Plan:
    """Return the plan with blends that converge fast.

    With the real share of a blend, replicas would become equal only after many periods.
    """

    return replace(plan, applies=tuple(effects.with_smaller_share(a, SHARE) for a in plan.applies))


def shorten_phases(plan: Plan) -> Plan:
    """Return the plan with each long run of equal iterations cut to `3 lag + 4` iterations."""
    program = Program(plan)
    keep = 3 * program.lag + 4
    bounds = program.bounds
    starts = {bounds[0]: 0}
    for a, z in pairwise(bounds):
        starts[z] = starts[a] + min(z - a, keep)
    if starts[bounds[-1]] == len(plan.phases):
        return plan
    return move_bounds(plan, starts)


def _all_rules(plan: Plan) -> list[Rule]:
    return [*plan.transfers, *plan.applies, *plan.votes]
