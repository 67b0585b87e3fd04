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


def used_in(name, seed):
    """(rank, iteration) -> the weights that the forward has used."""
    family, used = FAMILIES[name], {}

    def of_run(rank, iteration, run, weights):
        whole = used.setdefault((rank, iteration), np.zeros((N, SIZE)))
        whole[run.start : run.stop] = weights.reshape(-1, SIZE)
        return gradient(rank, iteration, whole)[run.start : run.stop].reshape(-1)

    model = InterpretedModel([SIZE] * N, START.reshape(-1), of_run, momentum)
    Interpreter(family.plan, model, family.workers).run(T, seed=seed)
    return used


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_its_equations(name):
    """Workers take turns in an order that chance decides; any order: test_random_plans.py."""
    assert (MOMENTUM, RATE) == (0.9, 0.1)
    family = FAMILIES[name]
    assert check(family.plan) == []
    used = used_in(name, seed=1)
    world, advance = World(family.workers), family.equations()
    for i in range(T):
        advance_to = world.w.copy()
        if name == "delayed" and advance.snapshot is not None:  # due when the forward begins
            advance_to = advance_to + advance.snapshot.mean(axis=0) - advance.snapshot
        for rank in family.compared:
            np.testing.assert_allclose(used[rank, i], advance_to[rank], rtol=0, atol=1e-12)
        advance(world, i)


def test_halves_of_any_size_on_any_number_of_ranks():
    """Shards are as equal as can be, the last ones may be empty."""
    for ranks in (1, 2, 3, 5):
        ends = []
        for name in ("wfbp", "dear"):
            task = Task([4, 5, 1], seed=ranks)
            ends.append(interpret_plan(FAMILIES[name].plan, task, ranks, 4))
        np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)
