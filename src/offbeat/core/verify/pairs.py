"""Plans of pairs of ranks on few ranks, so that their check does not execute every rank.

In such a plan each rank exchanges with at most one other rank in an iteration, and all pairs of all
iterations with exchanges have equal rules. The numbers that arrive are the only effect of a partner
on a rank, so a few ranks with the same rules in each phase find the same errors of rules and
messages. Whether the pairs connect all ranks is computed from the pairs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
        exchanged: buckets that pairs exchange.
    """

    plan: Plan
    ranks: int
    originals: Mapping[Rule, Rule]
    pairs: Mapping[int, Sequence[Pair]]
    exchanged: frozenset[int]

    @property
    def periods(self) -> int:
        """Return the periods in which few ranks become nearly equal, however few rounds a period
        has. Whether two periods suffice for all ranks is a question of the pairs."""
        return max(2, -(-ROUNDS // len(self.pairs)))

    def remaining_share(self, ranks: int, periods: int) -> float:
        """Return the share of the largest difference between ranks that remains after some periods
        if each pair takes its mean, measured from the end of the first period.

        Args:
            ranks: number of ranks of the original plan.
            periods: number of periods.
        """
        x = np.random.default_rng(0).normal(size=(ranks, NUMBERS))
        rounds = [np.array(self.pairs[phase]) for phase in sorted(self.pairs)]
        differences = []
        for _ in range(1 + periods):
            for pairs in rounds:
                x[pairs] = x[pairs].mean(axis=1, keepdims=True)
            differences.append(float(np.ptp(x, axis=0).max()))
        return differences[-1] / differences[0] if differences[0] else 0.0


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
    if rounds is None:
        return None
    pairs, exchanges, alone = rounds
    schedule, few = (EVEN, 4) if alone is None else (ODD, 5)
    of_pairs: dict[tuple[int, ...], list[int]] = defaultdict(list)
    of_single: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, phase in enumerate(sorted(pairs)):
        turn = schedule[number % len(schedule)]
        for pair in turn:
            of_pairs[pair].append(phase)
        for rank in {*range(few)}.difference(*turn):
            of_single[rank,].append(phase)
    transfers, applies = (
        [
            replace(kind, ranks=who, phases=Phases(phases))
            for who, phases in sorted(found.items())
            for kind in kinds
        ]
        for found, kinds in ((of_pairs, exchanges), (of_single, alone or ()))
    )
    first = {_kind(rule): rule for rule in reversed(_ranked_rules(plan))}
    small = replace(
        plan,
        transfers=_in_place(plan.transfers, transfers),
        applies=_in_place(plan.applies, applies),
    )
    return FewRanks(
        small,
        few,
        {rule: first[_kind(rule)] for rule in (*transfers, *applies)},
        pairs,
        frozenset(b for t in exchanges for b in t.payload.buckets),
    )


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


def _ranked_rules(plan: Plan) -> list[Any]:
    return [rule for rule in (*plan.transfers, *plan.applies) if rule.ranks is not None]


def _rounds(
    plan: Plan, ranks: int
) -> tuple[dict[int, list[Pair]], Sequence[Transfer], Sequence[Apply] | None] | None:
    """Return the pairs of each phase with exchanges; the exchanges of each pair, as those of ranks
    0 and 1; and the rules that each rank without a partner has of its own, None if there is no such
    rank.

    None if a rank has two partners in a phase, or if pairs have different rules, or ranks without a
    partner.
    """
    exchanges: dict[int, dict[Pair, list[Any]]] = defaultdict(lambda: defaultdict(list))
    applies: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rule in _ranked_rules(plan):
        kind, who = _kind(rule), sorted(rule.ranks)
        for phase in rule.phases:
            if isinstance(rule, Transfer):
                exchanges[phase][who[0], who[1]].append(kind)
                continue
            for rank in who:
                applies[phase][rank].append(kind)
    found = set()
    for phase, by_pair in exchanges.items():
        paired = {rank for pair in by_pair for rank in pair}
        alone, own = {*range(ranks)} - paired, applies.pop(phase, {})
        if len(paired) < 2 * len(by_pair) or not own.keys() <= alone:
            return None
        owns = {tuple(own.get(rank, ())) for rank in alone} or {None}
        found |= {*product(map(tuple, by_pair.values()), owns)}
    if applies or len(found) != 1:
        return None
    [(kinds, rules)] = found
    return {phase: [*by_pair] for phase, by_pair in exchanges.items()}, kinds, rules
