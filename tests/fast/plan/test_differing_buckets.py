"""Buckets that are said to differ between replicas differ where a plan is executed."""

from __future__ import annotations

from itertools import count, islice
from random import Random

import numpy as np
import pytest
from oracle.adversary import Problem, momentum
from oracle.plan_families import FAMILIES, SIZE, N
from oracle.random_plans import random_plan, ranks_of

from offbeat.core.derive.effects import differing_buckets
from offbeat.core.plan.program import Program
from offbeat.core.strategy.parsing import parse
from offbeat.core.verify.check import check, slices_of
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.worker import InterpretedModel
from offbeat.plan import Plan
from offbeat.profile import Bucket, Link, Profile

RANKS = 4
MOST = 8  # iterations

# Of these strategies the buckets that are said to differ are all that differ.
EXACT = (
    "local-sgd:period=3",
    "dreamddp:period=3",
    "dreamddp:period=3:due=forward",
    "dreamddp:period=3:due=delayed",
    "partial-sync:period=3",
    "diloco:period=3:fragments=1",
    "diloco:period=4:fragments=2",
    "fedavg:local_steps=3:fraction=0.5",
    "local-sgd:period=2:wire=int4",
    "selsync:delta=0.5",
    "selsync:delta=0.5:scope=layer",
    "des-loc:period=2",
    "eager:period=3",
    "sparseloco:period=3",
    "noloco:period=3",
    "bsp",
    "wfbp",
    "dear",
    "p3",
    "deft",
    "demo",
)


def profile_of(ranks: int) -> Profile:
    buckets = tuple(Bucket(f"layer {b}", 0.01, 0.02, 4 * SIZE) for b in range(N))
    return Profile(buckets, (Link("net", 1e-3, 1e6),), ranks)


def said_and_found(plan: Plan, problem: Problem, ranks: int, iterations: int):
    """Buckets that are said to differ after some iterations, and those that do."""
    model = InterpretedModel(problem.sizes, problem.start, problem.gradient, momentum)
    job = Interpreter(plan, model, ranks, flushing=range(ranks))
    job.run(iterations)
    said = differing_buckets(plan, iterations - 1, ranks, job.decisions)
    spread = np.ptp([worker.view("param", slice(None)) for worker in job.workers], axis=0)
    edges = problem.offsets
    return said, {b for b in range(plan.buckets) if spread[edges[b] : edges[b + 1]].max() > 1e-9}


@pytest.mark.parametrize("ranks", [2, RANKS])
@pytest.mark.parametrize("text", EXACT)
def test_of_strategies_it_is_exact(text: str, ranks: int) -> None:
    plan = parse(text).schedule(profile_of(ranks))
    problem = Problem([2 * size for size in slices_of(plan)])
    for iterations in range(1, MOST):
        said, found = said_and_found(plan, problem, ranks, iterations)
        assert said == found, (iterations, str(plan))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    family = FAMILIES[name]
    for iterations in range(1, MOST):
        said, found = said_and_found(family.plan, Problem([SIZE] * N), family.workers, iterations)
        assert said <= found, iterations


@pytest.mark.long
def test_random_plans() -> None:
    made = ((seed, random_plan(Random(seed))) for seed in count())
    differ = 0
    for seed, plan in islice(((s, p) for s, p in made if not check(p)), 60):
        problem = Problem([2 * size for size in slices_of(plan)])
        start = plan.prologue + Program(plan).lag
        for iterations in range(start + 1, start + 1 + plan.period):
            said, found = said_and_found(plan, problem, ranks_of(plan), iterations)
            assert said <= found, (seed, iterations, str(plan))
            differ += len(said)
    assert differ > 50
