"""Every registered strategy trains as its equations say, and moves what its plan promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import Case, build_model, profile_of
from reference.training import Replica, bsp, consolidate, local_sgd, partial_sync, replicas
from torch import Tensor
from workers import (
    Trained,
    train_beside_torch,
    train_cases,
    train_in_two_halves,
    train_with_straggler,
)
from worlds import run_world

from offbeat import DDP, Plan, Profile
from offbeat.sim import simulate
from offbeat.strategies import STRATEGIES, Strategy, create
from offbeat.trace import COMPUTE

# Settings beside the defaults; a strategy that is only registered is tested with its defaults.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{"bucket_cap_mb": 0.0002}],
    "wfbp": [{"fusion": "none"}, {"fusion": "ddp"}, {"fusion": "mg-wfbp"}],
    "local-sgd": [
        {"period": 1},
        {"period": 3, "state": "averaged"},
        {"period": 2, "warmup": 3, "state": "reset"},
    ],
    "partial-sync": [
        {"period": 2, "average": "before_update"},
        {"period": 3, "state": "averaged"},
        {"period": 3, "state": "averaged", "average": "before_update"},
        {"period": 7, "state": "reset"},
        {"period": 2, "state": "reset", "average": "before_update"},
    ],
    "dreamddp": [
        {"period": 2},
        {"period": 3, "fill": False, "solver": "balanced"},
        {"period": 3, "solver": "optimal", "average": "before_update", "state": "averaged"},
    ],
}
STRATEGIES_UNDER_TEST: list[Strategy] = [
    create(name, settings) for name in STRATEGIES for settings in [{}, *SETTINGS.get(name, [])]
]
PLANNED = [s for s in STRATEGIES_UNDER_TEST if s.name != "ddp"]  # torch runs DDP, not our engine
CASES = (
    Case("mlp", "sgd"),
    Case("mlp", "nesterov", "step"),
    Case("conv", "adam"),
    Case("mlp", "adamw", "cosine"),
    Case("conv", "groups", "step"),
)
CASES_OF_THREE = (CASES[1], CASES[2])
ITERATIONS = 14
STATE_COPIES = {"sgd": 0, "nesterov": 1, "groups": 1, "adam": 2, "adamw": 2}

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES_UNDER_TEST, ids=str)
every_plan = pytest.mark.parametrize("strategy", PLANNED, ids=str)
two_and_three = pytest.mark.parametrize("world_size", [2, 3])


# ---- (a) the numbers ------------------------------------------------------------------------


def sets_of(plan: Plan, profile: Profile) -> list[list[str]]:
    """Names of the tensors that the layer sets of a plan average, per iteration."""
    sets = zip(plan.notes["sets"], plan.notes["fill"], strict=True)
    return [[n for b in {*s, *fill} for n in profile.buckets[b].tensors] for s, fill in sets]


def layer_sets(world: list[Replica], iterations: range, strategy: Any) -> None:
    profile = profile_of(world[0].model, len(world))
    sets = sets_of(strategy.plan(profile), profile)
    partial_sync(world, iterations, sets=sets, average=strategy.average, state=strategy.state)


def local_steps(world: list[Replica], iterations: range, strategy: Any) -> None:
    local_sgd(
        world,
        iterations,
        period=strategy.period,
        warmup=strategy.warmup,
        state=strategy.state,
    )


def as_planned(world: list[Replica], iterations: range, strategy: Strategy) -> None:
    """For a strategy without equations of its own here: what its plan averages, one by one."""
    raise NotImplementedError(f"add the equations of {strategy.name} to REFERENCES")


REFERENCES: dict[str, Callable[[list[Replica], range, Any], None]] = {
    "ddp": lambda world, iterations, _: bsp(world, iterations, broadcast_buffers=True),
    "bsp": lambda world, iterations, _: bsp(world, iterations),
    "wfbp": lambda world, iterations, _: bsp(world, iterations),
    "local-sgd": local_steps,
    "partial-sync": layer_sets,
    "dreamddp": layer_sets,
}


@cache
def trained(strategy: Strategy, world_size: int) -> list[list[Trained]]:
    """Per rank and case what it has after training."""
    cases = CASES if world_size == 2 else CASES_OF_THREE
    return run_world(train_cases, world_size, strategy, cases, ITERATIONS)


@two_and_three
@every_strategy
def test_equals_the_equations(strategy: Strategy, world_size: int) -> None:
    cases = CASES if world_size == 2 else CASES_OF_THREE
    for i, case in enumerate(cases):
        world = replicas(case, world_size)
        REFERENCES.get(strategy.name, as_planned)(world, range(ITERATIONS), strategy)
        for replica, rank in zip(world, trained(strategy, world_size), strict=True):
            assert_same(rank[i], replica, f"{case}, rank {replica.rank}")


def assert_same(mine: Trained, replica: Replica, where: str) -> None:
    assert_close(mine.model, replica.model.state_dict(), f"{where}: model")
    assert_close(mine.optimizer, replica.optimizer.state_dict(), f"{where}: optimizer")


def assert_close(mine: Any, theirs: Any, where: str, tolerance: float = 1e-12) -> None:
    """Nested containers with equal keys, equal numbers and close tensors."""
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs) or sorted(mine) == sorted(theirs), where
        for key in theirs:
            assert_close(mine[key], theirs[key], f"{where}.{key}", tolerance)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for i, (m, t) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(m, t, f"{where}[{i}]", tolerance)
    else:
        assert mine == theirs, where
