"""Averages that land at the next forward or later, whatever the user's loop does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases import merging as support
from cases import workers
from cases.batches import Batch, Call
from cases.comparing import assert_same, sets_of
from cases.models import Case, Loop, profile_of
from cases.schedules import CASE, Script, follow
from cases.tiny_runs import data_of
from harness.ranks import run_ranks
from oracle.training import Replica, consolidate, delayed_sync, partial_sync, replicas

from offbeat import DreamDDP

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
        how = {"delay": strategy.delay, "average": strategy.when}
        delayed_sync(world, iterations, sets=sets, **how)
    else:
        partial_sync(world, iterations, sets=sets, average=strategy.when)


LOOPS = [
    (FORWARD, Loop(evaluate=True)),
    (LATE, Loop(evaluate=True)),
    (BEFORE, Loop(evaluate=True)),
    (LATE, Loop(clip=0.05)),
    (LATE_BEFORE, Loop(clip=0.05, clear="in place")),
    (LATE, Loop(idle=frozenset({(0, 2), (1, 5)}))),
    (FORWARD, Loop(micro=2)),
]


ONE, TWO = Batch(1), Batch(2)


def case_of(loop: Loop) -> Case:
    return Case("conv" if loop.evaluate else "mlp", "nesterov")


@TWO.each(
    workers.train_with,
    *((case_of(loop), strategy, range(ITERATIONS), loop, {}) for strategy, loop in LOOPS),
)
def test_loops(calls: list[Call]) -> None:
    """An evaluation does early what the next forward waits for; clipping sees local gradients."""
    for (strategy, loop), call in zip(LOOPS, calls, strict=True):
        case = case_of(loop)
        world = replicas(case, 2, loop)
        equations(world, range(ITERATIONS), strategy, case)
        for mine, replica in zip(call.results, world, strict=True):
            assert_same(mine, replica, f"{strategy}, {loop}, rank {replica.rank}")


SCRIPTS = [
    (strategy, Script(Case(model, "nesterov")))
    for strategy in (FORWARD, BEFORE)
    for model in ("earlier", "keeping")
]


@TWO.each(follow, *((script, strategy, ITERATIONS) for strategy, script in SCRIPTS))
def test_weights_that_a_later_forward_reads_earlier(calls: list[Call]) -> None:
    """The read waits for the average, and sees no weights of before."""
    for (strategy, script), call in zip(SCRIPTS, calls, strict=True):
        world = replicas(script.case, 2)
        equations(world, range(ITERATIONS), strategy, script.case)
        for (mine, _), replica in zip(call.results, world, strict=True):
            assert_same(mine, replica, f"{strategy}, {script}, rank {replica.rank}")


PAUSES = 3, 4
PAUSED = FORWARD, LATE


@TWO.each(support.train_with_pauses, *((strategy, PAUSES, ITERATIONS) for strategy in PAUSED))
def test_consolidate(calls: list[Call]) -> None:
    """A delayed plan begins anew: what has not landed would take equal replicas apart again."""
    for strategy, call in zip(PAUSED, calls, strict=True):
        world = replicas(CASE, 2)
        for start, stop in pairwise([0, *(t + 1 for t in PAUSES), ITERATIONS]):
            if start:
                consolidate(world)
            first = 0 if strategy.due == "delayed" else start
            equations(world, range(start, stop), strategy, CASE, first)
        for mine, replica in zip(call.results, world, strict=True):
            assert_same(mine, replica, f"{strategy}, rank {replica.rank}")


def recorded(directory: str, strategy: DreamDDP) -> list[Any]:
    """This rank's sample of its parameters, as a report reads it."""
    job = Path(directory, f"job{workers.rank()}.json")
    job.write_text(json.dumps({"schema": 1, "record_dir": directory}))
    os.environ["OFFBEAT_JOB"] = str(job)
    workers.train(CASE, strategy, range(4))
    sample = data_of(directory, workers.rank())["sample"]
    return [sample["iterations"], sample["numbers"]]


def test_samples_are_taken_once_everything_has_landed(tmp_path: Path) -> None:
    """With everything averaged in every iteration replicas are equal then, and not before."""
    one, other = run_ranks(2, recorded, str(tmp_path), DreamDDP(period=1, due="forward"))
    assert one == other
    assert one[0] == [0, 1, 2]


@ONE.each(
    support.tensor_bytes,
    *((strategy,) for strategy in (DreamDDP(period=3), DreamDDP(period=3, due="forward"), LATE)),
)
def test_memory_is_what_the_plan_says(calls: list[Call]) -> None:
    """Two more copies of the parameters, and nothing staged beside them; or none."""
    profile = profile_of(Case("mlp", "sgd"), 1)
    paper, forward, late = (call.results[0][0] for call in calls)
    assert forward == paper
    assert late - paper == LATE.plan(profile).fact("memory_bytes") > 0
