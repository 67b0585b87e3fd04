"""Models that `fully_shard` has divided inside nodes, averaged between nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.sharded_jobs import (
    OBSERVED,
    VARIANTS,
    MeasuredReplicas,
    Replicas,
    train_all,
    train_saved,
    train_variants,
)
from support.worlds import run_world

ITERATIONS = 7
STRATEGIES = (
    "local-sgd:period=3:state=averaged",
    "dreamddp:period=3:split=false:fill=false",
    "dreamddp:period=3:state=averaged:split=false",
    "dreamddp:period=3:due=forward:split=false",
    "diloco:period=3",
    "fedavg:local_steps=3",
    "selsync:delta=.05",
)


@pytest.mark.parametrize(
    ("replicas", "members", "strategies"),
    [(2, 2, STRATEGIES), (2, 3, STRATEGIES[2:3]), (3, 2, STRATEGIES[-1:])],
)
def test_equal_equations_of_replicas(
    replicas: int, members: int, strategies: tuple[str, ...]
) -> None:
    calls = [(strategy, replicas, ITERATIONS) for strategy in strategies]
    by_rank = run_world(train_all, replicas * members, calls, timeout_s=120)
    for number, name in enumerate(strategies):
        strategy, plan, names, _ = by_rank[0][number]
        assert all(results[number][1] == plan for results in by_rank)
        task = Replicas(names, members)
        world = MeasuredReplicas(task, replicas)
        advance = strategy.equations(plan)
        for iteration in range(ITERATIONS):
            advance(world, iteration)
            for rank, results in enumerate(by_rank):
                weights = task.flat(results[number][3][OBSERVED + iteration])
                apart = np.abs(weights - world.weights[rank // members]).max()
                assert apart <= 1e-12, (name, iteration, rank, apart, str(plan))


def test_checkpoints_continue_bit_by_bit(tmp_path: Path) -> None:
    for whole, resumed in run_world(train_saved, 4, str(tmp_path / "saved"), "diloco:period=4"):
        assert whole == resumed


def test_options_of_fsdp() -> None:
    """The same bits as a loop that averages the shards itself."""
    for found in run_world(train_variants, 4, [*VARIANTS]):
        assert {name: ours == theirs for name, (ours, theirs) in found.items()} == dict.fromkeys(
            VARIANTS, True
        )
