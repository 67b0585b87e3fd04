"""Plans of pairs: a check on few ranks decides as one that executes every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offbeat.core.verify import check as module
from offbeat.core.verify.pairs import on_few_ranks
from offbeat.plan import Moment, Payload, Plan, check
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import create

EVERY = 1000  # more ranks than a plan of this file has


def profile_of(ranks: int) -> Profile:
    buckets = tuple(Bucket(f"b{b}", 0.01, 0.02, 4000) for b in range(3))
    return Profile(buckets, (Link("net", 0.001, 1e6),), ranks)


def plan_of(ranks: int, **settings: Any) -> Plan:
    return create("noloco", {"period": 2, "rounds": 8, **settings}).plan(profile_of(ranks))


def change(plan: Plan, rules: str, number: int, **fields: Any) -> Plan:
    """The plan with other fields of one rule."""
    every = list(getattr(plan, rules))
    every[number] = replace(every[number], **fields)
    return replace(plan, **{rules: tuple(every)})


def step_of(plan: Plan) -> int:
    return next(i for i, a in enumerate(plan.applies) if a.rule == "step_in_pair")


def without_exchange(plan: Plan) -> Plan:
    return replace(plan, transfers=plan.transfers[1:])


def with_the_pairs_of_one_round(plan: Plan) -> Plan:
    first = min(phase for t in plan.transfers for phase in t.phases)
    ends = next(a.phases for a in plan.applies if a.rule == "step_in_pair")
    kept = [replace(t, phases=ends) for t in plan.transfers if first in t.phases]
    alone = [replace(a, phases=ends) for a in plan.applies if a.ranks and first in a.phases]
    common = [a for a in plan.applies if a.ranks is None]
    return replace(plan, transfers=tuple(kept), applies=(*common[:1], *alone, *common[1:]))


def without_own_rules(plan: Plan) -> Plan:
    return replace(plan, applies=tuple(a for a in plan.applies if a.ranks is None))


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "none": lambda plan: plan,
    "one round for ever": with_the_pairs_of_one_round,
    "a missing exchange": without_exchange,
    "no rules of ranks without a partner": without_own_rules,
    "a step before its message": lambda plan: change(
        plan, "applies", step_of(plan), at=Moment("step")
    ),
    "a step of two buckets of three": lambda plan: change(
        plan, "applies", step_of(plan), buckets=range(2)
    ),
    "an exchange of two buckets": lambda plan: replace(
        plan,
        transfers=tuple(replace(t, payload=Payload("param", range(2))) for t in plan.transfers),
    ),
    "a message that is late": lambda plan: replace(
        plan,
        transfers=tuple(replace(t, before=Moment("forward", 2, 1)) for t in plan.transfers),
    ),
    "no step in the last round": lambda plan: change(
        plan, "applies", step_of(plan), phases=sorted(plan.applies[step_of(plan)].phases)[:-1]
    ),
    "one pair sends other buckets": lambda plan: change(
        plan, "transfers", 0, payload=Payload("param", range(1, 3))
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        *((name, 10, {}) for name in CHANGES),
        *((name, 9, {"gamma": 0.4}) for name in ("none", "a message that is late")),
    ],
    ids=str,
)
def test_few_ranks_decide_as_all(name, settings, ranks, monkeypatch):
    plan = CHANGES[name](plan_of(ranks, **settings))
    found = check(plan, profile_of(ranks))
    monkeypatch.setattr(module, "MOST_EXECUTED", EVERY)
    every = check(plan, profile_of(ranks))
    assert bool(found) == bool(every), (found, every)
    if name == "none":
        assert not found
    if found:
        rules = {*plan.transfers, *plan.applies}
        assert all(rule in rules for rule in found[0].rules)
        assert found[0].plan is plan


@pytest.mark.long
def test_most_changes_are_errors():
    """So that equal decisions are no accident."""
    wrong = [name for name, act in CHANGES.items() if check(act(plan_of(9)), profile_of(9))]
    assert len(wrong) >= len(CHANGES) // 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [64, 65, 512])
def test_ranks_that_are_executed_do_not_grow(ranks, monkeypatch):
    executed = []

    class Counting(module.Interpreter):
        def __post_init__(self) -> None:
            executed.append(self.ranks)
            super().__post_init__()

    monkeypatch.setattr(module, "Interpreter", Counting)
    strategy, profile = create("noloco", {"period": 2}), profile_of(ranks)
    assert not check(strategy.plan(profile), profile)
    assert {*executed} == {4 + ranks % 2}


def test_pairs_that_do_not_connect_many_ranks_are_refused():
    for rounds in (1, 2):
        [problem] = check(plan_of(64, rounds=rounds), profile_of(64))
        assert "64 ranks after two periods, so its replicas drift apart" in str(problem)
    assert not check(plan_of(64, rounds=8), profile_of(64))


def test_only_plans_of_pairs_are_made_smaller():
    plan = plan_of(10)
    assert on_few_ranks(plan, 10) is not None
    partners = change(plan, "transfers", 0, phases=plan.phases)  # others exchange there, too
    assert on_few_ranks(partners, 10) is None
    assert on_few_ranks(CHANGES["a message that is late"](plan), 10) is None
    assert on_few_ranks(CHANGES["one pair sends other buckets"](plan), 10) is None
    for name in ("local-sgd", "cyclic"):
        assert on_few_ranks(create(name).plan(profile_of(3)), 3) is None
