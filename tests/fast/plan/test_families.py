"""Every family: the interpreter computes from its plan what its equations say."""

import numpy as np
import pytest
from oracle.adversary import MOMENTUM, RATE, momentum
from oracle.plan_families import FAMILIES, SIZE, START, N, T, World, gradient

from offbeat.core.verify.check import check
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.worker import InterpretedModel
from offbeat.testing.conformance import interpret_plan
from offbeat.testing.replicas import Task

every_family = pytest.mark.parametrize("name", FAMILIES)


def used_in(name, seed, flushing=()):
    """(rank, iteration) -> the weights that the forward has used; and the interpreter."""
    family, used = FAMILIES[name], {}

    def of_run(rank, iteration, run, weights):
        whole = used.setdefault((rank, iteration), np.zeros((N, SIZE)))
        whole[run.start : run.stop] = weights.reshape(-1, SIZE)
        return gradient(rank, iteration, whole)[run.start : run.stop].reshape(-1)

    model = InterpretedModel([SIZE] * N, START.reshape(-1), of_run, momentum)
    interpreter = Interpreter(family.plan, model, family.workers, flushing=flushing)
    interpreter.run(T, seed=seed)
    return used, interpreter


@every_family
def test_every_family_is_sound(name):
    assert check(FAMILIES[name].plan) == []


@every_family
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_equals_its_equations_in_any_order(name, seed):
    assert (MOMENTUM, RATE) == (0.9, 0.1)
    family = FAMILIES[name]
    used, _ = used_in(name, seed)
    world, advance = World(family.workers), family.equations()
    for i in range(T):
        advance_to = world.w.copy()
        if name == "delayed" and advance.snapshot is not None:  # due when the forward begins
            advance_to = advance_to + advance.snapshot.mean(axis=0) - advance.snapshot
        for rank in family.compared:
            np.testing.assert_allclose(used[rank, i], advance_to[rank], rtol=0, atol=1e-12)
        advance(world, i)


@every_family
def test_a_rank_that_evaluates_trains_the_same(name):
    plain, _ = used_in(name, None)
    early, _ = used_in(name, 3, flushing=(0, 2))
    assert plain.keys() == early.keys()
    for at in plain:
        np.testing.assert_array_equal(plain[at], early[at])


def test_votes_are_mixed_and_known():
    _, interpreter = used_in("selsync", 1)
    family = FAMILIES["selsync"]
    world, equations = World(), family.equations()
    for i in range(T):
        equations(world, i)
    said = [interpreter.decisions["sync", i] for i in range(T)]
    assert said == equations.votes
    assert {True, False} == set(said)


def test_halves_of_any_size_on_any_number_of_ranks():
    """Shards are as equal as can be, the last ones may be empty."""
    for ranks in (1, 2, 3, 5):
        ends = []
        for name in ("wfbp", "dear"):
            task = Task([4, 5, 1], seed=ranks)
            ends.append(interpret_plan(FAMILIES[name].plan, task, ranks, 4))
        np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)
