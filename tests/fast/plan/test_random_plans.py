"""Random plans: what `check` accepts has one meaning, whatever a real machine does."""

from __future__ import annotations

import json
from functools import cache
from itertools import count, islice
from random import Random

import numpy as np
import pytest
from harness.parts import (
    RULES,
    WIRES,
    InterpretedModel,
    Interpreter,
    Program,
    slices_of,
)
from oracle.adversary import Machine, Problem, momentum
from oracle.random_plans import random_plan, ranks_of

from offbeat.plan import VERBS, Plan, check

PLANS = 250
EXECUTED = 30
KINDLY, UNKINDLY = (None, 0, 1), range(4)


@cache
def plans() -> list[tuple[int, Plan, bool]]:
    """(seed, plan, whether it is accepted)."""
    made = [(seed, random_plan(Random(seed))) for seed in range(PLANS)]
    return [(seed, plan, not check(plan)) for seed, plan in made]


@cache
def accepted() -> list[tuple[int, Plan]]:
    return [(seed, plan) for seed, plan, sound in plans() if sound]


def first_accepted(number: int) -> list[tuple[int, Plan]]:
    """Return the first accepted plans with their seeds, without checks of the others."""
    made = ((seed, random_plan(Random(seed))) for seed in count())
    return [*islice(((seed, plan) for seed, plan in made if not check(plan)), number)]


def some() -> list[tuple[int, Plan]]:
    return accepted()[:: max(len(accepted()) // EXECUTED, 1)]


def iterations_of(plan: Plan) -> int:
    return plan.prologue + 2 * plan.period + Program(plan).lag + 3


def problem_of(plan: Plan) -> Problem:
    return Problem([2 * size for size in slices_of(plan)])


def trained(plan, problem, *, seed=None, flushing=(), iterations=None):
    """(rank, iteration, bucket) -> the weights that it was trained with."""
    used = {}

    def gradient(rank, iteration, run, weights):
        first = problem.offsets[run.start]
        for b in run:
            at = slice(problem.offsets[b] - first, problem.offsets[b + 1] - first)
            used[rank, iteration, b] = weights[at].copy()
        return problem.gradient(rank, iteration, run, weights)

    model = InterpretedModel(problem.sizes, problem.start, gradient, momentum)
    interpreter = Interpreter(plan, model, ranks_of(plan), flushing=flushing)
    interpreter.run(iterations or iterations_of(plan), seed=seed)
    return used


def assert_same(one, other, words, tolerance=0.0):
    assert one.keys() == other.keys()
    for at, weights in one.items():
        np.testing.assert_allclose(weights, other[at], rtol=0, atol=tolerance, err_msg=words)


@pytest.mark.long
def test_they_cover_everything():
    mine = [plan for _, plan in accepted()]
    assert PLANS / 3 <= len(mine) <= PLANS * 0.9
    transfers = [t for plan in mine for t in plan.transfers]
    applies = [a for plan in mine for a in plan.applies]
    # A broadcast is of nothing trained, and an exchange is of one method.
    assert {t.verb for t in transfers} == set(VERBS) - {"broadcast", "exchange"}
    general = {name for name, rule in RULES.items() if rule.__module__.startswith("offbeat.core.")}
    assert {a.rule for a in applies} == general  # other rules are each of one method
    assert {t.payload.buffer for t in transfers} >= {"grad", "param", "state", "snapshot", "share"}
    assert {plan.period for plan in mine} == set(range(1, 6))
    assert {plan.prologue for plan in mine} == set(range(4))
    assert {t.payload.age for t in transfers} == {0, 1}
    assert {t.payload.width for t in transfers if t.payload.parts > 1} >= {1, 2}
    assert {t.link for t in transfers} >= {"net", "net#1", "aux", "aux#1", "node"}
    assert {t.before.lag for t in transfers} >= {0, 1, 2, 3}
    assert any(t.into for t in transfers if t.verb == "send")
    assert any(t.into is None for t in transfers if t.verb == "send")
    assert any(t.into for t in transfers if t.verb == "all_reduce")
    assert {bool(t.wire.error) for t in transfers if t.wire} == {True, False}
    assert {bool(t.wire.anchor) for t in transfers if t.wire} == {True, False}
    codecs = {name for name, cls in WIRES.items() if ".methods." not in cls.__module__}
    assert {
        t.wire.name for t in transfers if t.wire
    } == codecs  # others: strategies/test_methods.py
    assert {t.wire.arg("via") for t in transfers if t.wire} == {"gather", "scatter", None}
    handed = {
        (t.payload.buffer, bool(t.wire.error)) for t in transfers if t.verb == "send" and t.wire
    }
    assert handed == {("grad", True), ("grad", False), ("param", False)}
    assert any(t.when for t in transfers)
    assert any(a.when for a in applies)
    assert any(a.ranks for a in applies)
    assert {a.at.point for a in applies if a.rule == "local"} >= {"forward", "grad", "step"}


@pytest.mark.long
def test_json_round_trip():
    for seed, plan, _ in plans():
        again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan, seed
        assert (again.digest, str(again)) == (plan.digest, str(plan)), seed


@pytest.mark.long
def test_weights_are_the_same_in_any_order():
    for seed, plan in some():
        problem = problem_of(plan)
        first, *others = (trained(plan, problem, seed=s) for s in KINDLY)
        for other in others:
            assert_same(first, other, f"seed {seed}\n{plan}")


@pytest.mark.long
def test_finishing_early_changes_nothing():
    for seed, plan in some():
        problem, ranks = problem_of(plan), ranks_of(plan)
        plain = trained(plan, problem)
        for flushing in (range(ranks), range(1), range(1, ranks)):
            early = trained(plan, problem, flushing=flushing, seed=seed)
            assert_same(plain, early, f"seed {seed}, {flushing}\n{plan}")


@pytest.mark.long
def test_no_machine_is_so_unkind_that_weights_differ():
    for seed, plan in some():
        problem = problem_of(plan)
        plain = trained(plan, problem)
        for s in UNKINDLY:
            lazy, flushes = (0, 0.5, 0.95, 1)[s], (0, 0, 0.5, 1)[s]
            machine = Machine(plan, problem, ranks_of(plan), seed=s, lazy=lazy, flushes=flushes)
            unkind = machine.run(iterations_of(plan))
            assert_same(plain, unkind, f"seed {seed}, machine {s}\n{plan}", 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_equal_seeds_make_equal_plans(seed):
    assert random_plan(Random(seed)) == random_plan(Random(seed))
