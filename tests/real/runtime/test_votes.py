"""Votes on real ranks: what they decide, what users' loops see of it, what is recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import workers
from cases.batches import Batch, Call
from cases.models import Case, Loop
from cases.tiny_runs import data_of, write_tiny
from cases.workers import Trained
from harness.ranks import run_ranks

from offbeat import BSP, FedAvg, SelSync, Strategy
from offbeat.core.plan.program import Step
from offbeat.core.runtime.actions import Votes
from offbeat.core.runtime.active_plan import ActivePlan
from offbeat.experiments import report as reports
from offbeat.experiments.predictions import outcomes_of
from offbeat.experiments.record.run_directory import Repetition
from offbeat.experiments.report.votes import votes_of
from offbeat.jobs.record_lines import rank_file
from offbeat.plan import Apply, Moment, Phases, local

CASE = Case("mlp", "nesterov", "step")
GRADIENTS = SelSync(delta=0, aggregate="gradients")


def several(case: Case, strategies: list[Strategy], loop: Loop, iterations: int) -> list[Trained]:
    """What a rank has after training with each of them."""
    return [
        workers.train_with(case, strategy, range(iterations), loop, {}) for strategy in strategies
    ]


LOOPS = {
    "clipped": Loop(clip=0.05),
    "scaled": Loop(scale=1024.0, clip=0.1, overflow=frozenset({(1, 2)})),
    "dropped": Loop(dropped=frozenset({1, 4})),
    "in parts": Loop(micro=2, evaluate=True),
    "idle": Loop(idle=frozenset({(0, 2)})),
}


TWO = Batch(2)
SEEN = {name: TWO.add(several, CASE, [GRADIENTS, BSP()], loop, 6) for name, loop in LOOPS.items()}


@pytest.mark.parametrize("name", LOOPS)
def test_averaged_gradients_are_seen_before_the_step_as_those_of_bsp(name: str) -> None:
    """Bit for bit, clipped or unscaled as the user's loop does."""
    for mine, theirs in SEEN[name].results:
        for key, tensor in theirs.model.items():
            assert torch.equal(mine.model[key], tensor), key


ROUNDS = [SelSync(delta=0), SelSync(delta=0, scope="layer"), FedAvg(local_steps=1), BSP()]


@TWO.given(several, CASE, ROUNDS, Loop(), 6)
def test_parameters_and_rounds_of_one_step_are_bsp_up_to_rounding(call: Call) -> None:
    for *mine, theirs in call.results:
        for other in mine:
            for name, tensor in theirs.model.items():
                torch.testing.assert_close(other.model[name], tensor, rtol=1e-12, atol=1e-12)


def test_an_earlier_vote_counts_from_the_first_iteration_that_has_its_outcome() -> None:
    votes = Votes({}, Mock(), Mock(), 0, 2)
    votes.outcomes = {("v", 0): [], ("v", 1): [1]}
    rule = Apply("local", range(1), Moment("step"), Phases([0]), None, "v", ago=1)
    assert [votes.allows(rule, planned) for planned in range(3)] == [True, False, True]


def test_updates_that_a_vote_excludes_are_not_shown_before_the_step() -> None:
    votes = Votes({}, Mock(), Mock(), 0, 2)
    votes.outcomes = {("v", 0): [], ("v", 1): [1]}
    rule = Apply("local", range(1), Moment("step"), Phases([0]), None, "v")
    other = local(1, Moment("step"), [0])
    run: Any = SimpleNamespace(votes=votes)
    step = Step(2, apply=((0, rule), (0, other)))
    assert ActivePlan.first_updates(run, step, 0) == [other]
    assert ActivePlan.first_updates(run, step, 1) == [rule, other]


def recorded(directory: str, strategy: Strategy) -> dict[str, Any]:
    """Train and record; rank 1 has no gradient in iteration 4."""
    job = Path(directory) / f"job{workers.rank()}.json"
    job.write_text(json.dumps({"schema": 1, "record_dir": directory}))
    os.environ["OFFBEAT_JOB"] = str(job)
    workers.train_with(CASE, strategy, range(10), Loop(idle=frozenset({(1, 4)})), {})
    del os.environ["OFFBEAT_JOB"]
    return data_of(directory, workers.rank())


@pytest.mark.parametrize(
    ("strategy", "names", "lag"),
    [
        (SelSync(delta=0.6, window=1), ["sync"], 0),
        (SelSync(delta=0.6, window=1, scope="layer"), [f"layer {b}" for b in range(4)], 1),
    ],
    ids=str,
)
def test_every_iteration_is_recorded(
    strategy: SelSync, names: list[str], lag: int, tmp_path: Path
) -> None:
    records = run_ranks(2, recorded, str(tmp_path), strategy)
    mine, theirs = (record["votes"] for record in records)
    assert mine["iterations"] == theirs["iterations"] == list(range(10))
    assert list(mine["by_vote"]) == names
    known = 10 - lag  # the last outcome may not be known at the end
    for name in names:
        columns = [told["by_vote"][name] for told in (mine, theirs)]
        assert columns[0]["yes"] == columns[1]["yes"]
        assert columns[0]["yes"][known:] == [None] * lag
        for i in range(known):
            says = [not column["change"][i] < strategy.delta for column in columns]
            assert columns[0]["yes"][i] == [rank for rank in (0, 1) if says[rank]]
        assert columns[0]["yes"][0] == [0, 1]
        assert columns[1]["norm"][4] == 0
        assert 1 in columns[1]["yes"][4]
    outcomes = outcomes_of(rank_file(tmp_path, 0))
    goes = [[i < lag or outcomes[name][i - lag] for name in names] for i in range(10)]
    assert [sent > 0 for sent in mine["sent_bytes"]] == list(map(any, goes))
    assert [spared > 0 for spared in mine["spared_bytes"]] == [not all(now) for now in goes]
    [both] = {a + b for a, b in zip(mine["sent_bytes"], mine["spared_bytes"], strict=True)}
    votes = votes_of(load(tmp_path, records))
    assert votes is not None
    assert votes.odd == len(names)
    assert votes.lssr == pytest.approx(sum(mine["spared_bytes"]) / (10 * both))
    assert votes.yes_iterations(1)[0] == 0
    assert 4 in votes.yes_iterations(1)


def load(path: Path, records: list[dict[str, Any]]) -> Repetition:
    """As the report reads them."""
    write_tiny(path / "run", {"selsync": [records]})
    [contestant] = reports.load(path / "run").contestants
    return contestant.repetitions[0]
