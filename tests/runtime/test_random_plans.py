"""What `check` accepts, the runtime executes, with the interpreter's meaning."""

from random import Random

import numpy as np
import pytest
from support.quadratic import Quadratic, interpreted, ran
from support.random_plans import random_plan, ranks_of

from offbeat.core.plan.program import Program
from offbeat.core.verify.check import check

PLANS, PARTS = 300, 4  # accepted ones, in so many tests
TOLERANCE = 1e-12


def accepted(part):
    """Random plans that `check` accepts, with their seeds."""
    seed, found = part, 0
    while found < PLANS // PARTS:
        plan = random_plan(Random(seed), broken=0.2)
        if not check(plan):
            found += 1
            yield seed, plan
        seed += PARTS


def task_of(plan, seed):
    rng = Random(seed)
    weighted = any(apply.rule in ("scale", "select") for apply in plan.applies)  # by rank
    more = rng.choice((2, 2, 3)) if plan.uniform and not weighted else 0
    ranks = max(ranks_of(plan), more)
    # One period and whatever it has under way, or two so that it meets itself.
    iterations = plan.prologue + rng.choice((1, 2)) * plan.period + Program(plan).lag + 1
    sizes = tuple(rng.choice((1, 3, 5, 8)) for _ in range(plan.buckets))
    return Quadratic(sizes, ranks, iterations, seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_runtime_computes_what_the_interpreter_computes(part):
    for seed, plan in accepted(part):
        task = task_of(plan, seed)
        expected = np.array(interpreted(plan, task, seed=seed))
        found = np.array(ran(plan, task))
        apart = np.abs(found - expected).max()
        assert apart < TOLERANCE, f"seed {seed}: {apart:.1e} apart\n{plan}"
