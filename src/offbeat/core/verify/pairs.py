"""Plans of pairs of ranks on few ranks, so that their check does not execute every rank.

In such a plan each rank exchanges with at most one other rank in an iteration, and all pairs of an
iteration have equal rules. The numbers that arrive are the only effect of a partner on a rank, so a
few ranks with the same rules in each phase find the same errors of rules and messages. Whether the
pairs connect all ranks is computed from the pairs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.core.derive import effects
from offbeat.core.derive.fit import Rule
from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import Apply, Plan, Transfer

Pair = tuple[int, int]
MOST_MESSAGES = 1 << 20  # of all pairs in a period; a plan with more of them executes every rank
ROUNDS = 32  # that make few ranks nearly equal: differences halve in about one or two of them
NUMBERS = 8  # random numbers of each rank, whose differences pairs reduce
# Pairs of each round: of four ranks, and of five, of which one is alone.
EVEN: Sequence[Sequence[Pair]] = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
ODD: Sequence[Sequence[Pair]] = (
    ((1, 4), (2, 3)),
    ((0, 2), (3, 4)),
    ((0, 4), (1, 3)),
    ((0, 1), (2, 4)),
    ((0, 3), (1, 2)),
)


@dataclass(frozen=True)
class FewRanks:
    """A plan of pairs on few ranks.

    Attributes:
        plan: the plan on few ranks.
        ranks: number of ranks of `plan`.
        originals: for each rule of `plan` that names ranks, a rule of the original plan that it
            stands for.
        pairs: pairs of the original plan by phase.
        covered: phases in which pairs exchange each bucket.
    """

    plan: Plan
    ranks: int
    originals: Mapping[Rule, Rule]
    pairs: Mapping[int, Sequence[Pair]]
    covered: Sequence[frozenset[int]]

    @property
    def periods(self) -> int:
        """Return the periods in which few ranks become nearly equal, however few rounds a period
        has. Whether two periods suffice for all ranks is a question of the pairs."""
        return max(2, -(-ROUNDS // len(self.pairs)))

    def remaining_share(self, ranks: int, bucket: int, periods: int) -> float:
        """Return the share of the largest difference between ranks that remains after some periods
        if each pair takes its mean, measured from the end of the first period.

        Args:
            ranks: number of ranks of the original plan.
            bucket: bucket whose exchanges count.
            periods: number of periods.
        """
        x = np.random.default_rng(0).normal(size=(ranks, NUMBERS))
        rounds = [np.array(self.pairs[phase]) for phase in sorted(self.covered[bucket])]
        differences = []
        for _ in range(1 + periods):
            for pairs in rounds:
                x[pairs] = x[pairs].mean(axis=1, keepdims=True)
            differences.append(float(np.ptp(x, axis=0).max()))
        return differences[-1] / differences[0] if differences[0] else 0.0


@dataclass(frozen=True)
class _Round:
    """Rules of a phase in which pairs exchange.

    Attributes:
        pairs: the pairs.
        exchanges: exchanges of each pair, as those of ranks 0 and 1.
        alone: rules that each rank without a partner has of its own; None if there is no such rank.
    """

    pairs: Sequence[Pair]
    exchanges: tuple[Transfer, ...]
    alone: tuple[Apply, ...] | None


def on_few_ranks(plan: Plan, ranks: int) -> FewRanks | None:
    """Return a plan of pairs on four or five ranks; None for any other plan.

    Messages must end in their own iteration, so that an error needs no two phases of one rank.

    Args:
        plan: plan without faults of names and numbers.
        ranks: number of ranks.
    """
    if plan.votes or plan.groups or plan.source is not None or not _is_plan_of_pairs(plan):
        return None
    rounds = _rounds(plan, ranks)
    if rounds is None or len({one.alone is None for one in rounds.values()}) != 1:
        return None
    is_even = next(iter(rounds.values())).alone is None
    schedule, few = (EVEN, 4) if is_even else (ODD, 5)
    exchanges: dict[tuple[Pair, Transfer], list[int]] = defaultdict(list)
    applies: dict[tuple[int, Apply], list[int]] = defaultdict(list)
    for number, phase in enumerate(sorted(rounds)):
        pairs = schedule[number % len(schedule)]
        for pair in pairs:
            for kind in rounds[phase].exchanges:
                exchanges[pair, kind].append(phase)
        for rank in {*range(few)}.difference(*pairs):
            for own in rounds[phase].alone or ():
                applies[rank, own].append(phase)
    first_of = _first_rules(plan)
    order = {kind: place for place, kind in enumerate(first_of)}
    originals: dict[Rule, Rule] = {}

    def make_rules(found: Mapping[Any, list[int]], ranks_of: Any) -> list[Any]:
        rules = []
        for (who, kind), phases in sorted(
            found.items(), key=lambda one: (one[0][0], order[one[0][1]])
        ):
            rules.append(replace(kind, ranks=ranks_of(who), phases=Phases(phases)))
            originals[rules[-1]] = first_of[kind]
        return rules

    small = replace(
        plan,
        transfers=_in_place(plan.transfers, make_rules(exchanges, lambda pair: pair)),
        applies=_in_place(plan.applies, make_rules(applies, lambda rank: (rank,))),
    )
    covered = [
        frozenset(
            phase
            for phase, one in rounds.items()
            if any(bucket in t.payload.buckets for t in one.exchanges)
        )
        for bucket in range(plan.buckets)
    ]
    return FewRanks(small, few, originals, {p: one.pairs for p, one in rounds.items()}, covered)


def _is_plan_of_pairs(plan: Plan) -> bool:
    """Return whether all rules of single ranks are exchanges within an iteration, and applies."""
    exchanges = [t for t in plan.transfers if t.ranks is not None]
    if not exchanges or sum(len(t.phases) for t in exchanges) > MOST_MESSAGES:
        return False
    if any(t.verb != "exchange" or t.after.lag or t.before.lag for t in exchanges):
        return False
    if any(a.at.lag for a in plan.applies if a.ranks is not None):
        return False
    if any(True for a in plan.applies for _ in effects.per_rank_settings(a)):
        return False
    return all(map(_are_together, (plan.transfers, plan.applies)))


def _are_together(rules: Sequence[Transfer | Apply]) -> bool:
    """Return whether no rule of all ranks stands between rules of single ranks."""
    places = [place for place, rule in enumerate(rules) if rule.ranks is not None]
    return not places or places[-1] - places[0] + 1 == len(places)


def _in_place(rules: Sequence[Any], made: Sequence[Any]) -> tuple[Any, ...]:
    """Return rules with others in the place of those of single ranks."""
    first = next((p for p, rule in enumerate(rules) if rule.ranks is not None), len(rules))
    common = [rule for rule in rules if rule.ranks is None]
    return (*common[:first], *made, *common[first:])


def _kind(rule: Any) -> Any:
    """Return a rule of single ranks without its ranks and phases."""
    ranks = (0, 1) if isinstance(rule, Transfer) else (0,)
    return replace(rule, ranks=ranks, phases=Phases([0]))


def _first_rules(plan: Plan) -> dict[Any, Any]:
    """Return the first rule of each kind, in the order of the plan."""
    first: dict[Any, Any] = {}
    for rule in _ranked_rules(plan):
        first.setdefault(_kind(rule), rule)
    return first


def _ranked_rules(plan: Plan) -> Iterator[Transfer | Apply]:
    yield from (rule for rule in (*plan.transfers, *plan.applies) if rule.ranks is not None)


def _rounds(plan: Plan, ranks: int) -> dict[int, _Round] | None:  # noqa: C901
    """Return the round of each phase with exchanges.

    None if a rank has two partners in a phase, or if pairs of a phase have different rules, or
    ranks without a partner, or if rules of one kind are not in the same order in all phases.
    """
    order = {kind: place for place, kind in enumerate(_first_rules(plan))}
    exchanges: dict[int, dict[Pair, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    applies: dict[int, dict[int, list[Apply]]] = defaultdict(lambda: defaultdict(list))
    for rule in _ranked_rules(plan):
        kind = _kind(rule)
        assert rule.ranks is not None
        for phase in rule.phases:
            if isinstance(rule, Transfer):
                one, other = sorted(rule.ranks)
                exchanges[phase][one, other].append(kind)
                continue
            for rank in rule.ranks:
                applies[phase][rank].append(kind)
    if not applies.keys() <= exchanges.keys():
        return None
    rounds = {}
    for phase, by_pair in exchanges.items():
        paired = {rank for pair in by_pair for rank in pair}
        alone, own = {*range(ranks)} - paired, applies[phase]
        if len(paired) < 2 * len(by_pair) or not own.keys() <= alone:
            return None
        kinds = {tuple(each) for each in by_pair.values()}
        owns = {tuple(own.get(rank, ())) for rank in alone}
        if len(kinds) > 1 or len(owns) > 1:
            return None
        for rules in (*kinds, *owns):
            if sorted(rules, key=lambda rule: order[rule]) != list(rules):
                return None
        rounds[phase] = _Round([*by_pair], kinds.pop(), owns.pop() if owns else None)
    return rounds
