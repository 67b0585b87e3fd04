"""Averages that land at the next forward or later, whatever the user's loop does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cases import merging as support
from cases import workers
from cases.comparing import assert_same, sets_of
from cases.models import Case, Loop, profile_of
from cases.schedules import CASE, Script, follow_all
from harness.ranks import run_ranks
from oracle.training import Replica, consolidate, delayed_sync, partial_sync, replicas

from offbeat import DreamDDP
from offbeat.experiments.record import record_file as blocks
from offbeat.strategies.partial_sync import average_of

FORWARD = DreamDDP(period=2, due="forward")
BEFORE = DreamDDP(period=2, due="forward", average="before_update")
LATE = DreamDDP(period=3, due="delayed", delay=2)
LATE_BEFORE = DreamDDP(period=3, due="delayed", delay=2, average="before_update")
ITERATIONS = 9


def equations(
    world: list[Replica], iterations: Sequence[int], strategy: DreamDDP, case: Case, first: int = 0
) -> None:
    """From the plan's iteration `first` on."""
    profile = profile_of(case, len(world))
    late = strategy.due == "delayed"
    sets = sets_of(strategy.plan(profile), profile, "average" if late else "param")
    sets = sets[first % len(sets) :] + sets[: first % len(sets)]
    if late:
        how = {"delay": strategy.delay, "average": average_of(strategy.average)}
        delayed_sync(world, iterations, sets=sets, **how)
    else:
        partial_sync(world, iterations, sets=sets, average=average_of(strategy.average))


LOOPS = [
    (FORWARD, Loop(evaluate=True)),
    (LATE, Loop(evaluate=True)),
    (BEFORE, Loop(evaluate=True)),
    (LATE, Loop(clip=0.05)),
    (LATE_BEFORE, Loop(clip=0.05, clear="in place")),
    (LATE, Loop(idle=frozenset({(0, 2), (1, 5)}))),
    (FORWARD, Loop(micro=2)),
]


@pytest.mark.parametrize(("strategy", "loop"), LOOPS, ids=str)
def test_loops(strategy: DreamDDP, loop: Loop) -> None:
    """An evaluation does early what the next forward waits for; clipping sees local gradients."""
    case = Case("conv" if loop.evaluate else "mlp", "nesterov")
    ranks = run_ranks(2, workers.train_with, case, strategy, range(ITERATIONS), loop, {})
    world = replicas(case, 2, loop)
    equations(world, range(ITERATIONS), strategy, case)
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


@pytest.mark.parametrize("strategy", [FORWARD, BEFORE], ids=str)
def test_weights_that_a_later_forward_reads_earlier(strategy: DreamDDP) -> None:
    """The read waits for the average, and sees no weights of before."""
    scripts = [Script(Case(model, "nesterov")) for model in ("earlier", "keeping")]
    ranks = run_ranks(2, follow_all, scripts, strategy, ITERATIONS)
    for i, script in enumerate(scripts):
        world = replicas(script.case, 2)
        equations(world, range(ITERATIONS), strategy, script.case)
        for (mine, _), replica in zip((of_rank[i] for of_rank in ranks), world, strict=True):
            assert_same(mine, replica, f"rank {replica.rank}")


@pytest.mark.parametrize("strategy", [FORWARD, LATE], ids=str)
def test_consolidate(strategy: DreamDDP) -> None:
    """A delayed plan begins anew: what has not landed would take equal replicas apart again."""
    pauses = 3, 4
    ranks = run_ranks(2, support.train_with_pauses, strategy, pauses, ITERATIONS)
    world = replicas(CASE, 2)
    for start, stop in pairwise([0, *(t + 1 for t in pauses), ITERATIONS]):
        if start:
            consolidate(world)
        first = 0 if strategy.due == "delayed" else start
        equations(world, range(start, stop), strategy, CASE, first)
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


def recorded(directory: str, strategy: DreamDDP) -> list[Any]:
    """This rank's sample of its parameters, as a report reads it."""
    job = Path(directory, f"job{workers.rank()}.json")
    job.write_text(json.dumps({"schema": 1, "record_dir": directory}))
    os.environ["OFFBEAT_JOB"] = str(job)
    workers.train(CASE, strategy, range(4))
    sample = blocks.read(blocks.path_of(directory, workers.rank()))["sample"]
    return [sample["iterations"], sample["numbers"]]


def test_samples_are_taken_once_everything_has_landed(tmp_path: Path) -> None:
    """With everything averaged in every iteration replicas are equal then, and not before."""
    one, other = run_ranks(2, recorded, str(tmp_path), DreamDDP(period=1, due="forward"))
    assert one == other
    assert one[0] == [0, 1, 2]


def test_memory_is_what_the_plan_says() -> None:
    """Two more copies of the parameters, and nothing staged beside them; or none."""
    profile = profile_of(Case("mlp", "sgd"), 1)
    paper, forward, late = (
        run_ranks(1, support.tensor_bytes, strategy)[0][0]
        for strategy in (DreamDDP(period=3), DreamDDP(period=3, due="forward"), LATE)
    )
    assert forward == paper
    assert late - paper == LATE.plan(profile).fact("memory_bytes") > 0
