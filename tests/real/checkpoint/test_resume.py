"""A run that is resumed at any position, in new processes, ends where it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import checkpoint_jobs as jobs
from cases.models import Case
from cases.strategy_lists import STRATEGIES
from harness.parts import module_names, setting_names
from harness.ranks import run_ranks

import offbeat
from offbeat.strategies import create

ADAM = Case("conv", "adam", "step")
MLP = Case("mlp", "nesterov", "cosine")
DEEP = Case("deep", "adam", "step")

# What these keep between iterations is what another strategy keeps: nothing but the position, or
# gradients that are sent until the next forward.
SAME_STATE = {"asc-wfbp", "bsp", "bytescheduler", "us-byte"}
# One of each kept state, for two periods and more.
TRIALS: dict[str, list[jobs.Trial]] = {
    "gradients": [
        jobs.Trial(offbeat.WFBP(), ADAM, 3),
        jobs.Trial(offbeat.DDP(), MLP, 3),
        jobs.Trial(offbeat.P3(), jobs.CASE, 3),
        jobs.Trial(offbeat.P3(), MLP, 3, clip=0.1),  # a variant
        jobs.Trial(offbeat.DeAR(), jobs.CASE, 3),
        jobs.Trial(offbeat.DeFT(), jobs.CASE, 7),
        jobs.Trial(offbeat.WFBP(wire="powersgd:1"), MLP, 3),
        jobs.Trial(offbeat.Cyclic(rule="v1"), MLP, 4),
        jobs.Trial(offbeat.Cyclic(wire="int4"), jobs.CASE, 4),
    ],
    "parameters": [
        jobs.Trial(offbeat.PartialSync(period=3), ADAM, 5),
        jobs.Trial(offbeat.DreamDDP(period=2, clip=0.1, state="averaged"), MLP, 3),
        jobs.Trial(offbeat.DreamDDP(period=4, due="forward"), DEEP, 5),
        jobs.Trial(offbeat.DreamDDP(period=3, due="delayed", delay=2, wire="int8"), jobs.CASE, 6),
        jobs.Trial(offbeat.DiLoCo(period=3, fragments=2, delay=2, alpha=0.5), jobs.CASE, 6),
        jobs.Trial(offbeat.DiLoCo(period=3, fragments=2, delay=2, wire="sign"), jobs.CASE, 6),
        jobs.Trial(offbeat.LocalSGD(period=2, wire="topk:0.1"), ADAM, 5),
        jobs.Trial(offbeat.LocalSGD(period=2, wire="randomk:0.1", state="averaged"), ADAM, 5),
        jobs.Trial(offbeat.FedAvg(local_steps=(1, 2), fraction=0.5, wire="int4"), MLP, 5),
        jobs.Trial(offbeat.SelSync(delta=0.2), jobs.CASE, 5),
        jobs.Trial(offbeat.SelSync(delta=0.2, scope="layer"), MLP, 5),
    ],
    "methods": [
        jobs.Trial(create(name, {"period": 2} if "period" in setting_names(name) else {}), ADAM, 5)
        for name in module_names()
        if name in STRATEGIES
    ],
}


def test_no_strategy_is_left_out() -> None:
    tried = {trial.strategy.name for trials in TRIALS.values() for trial in trials}
    assert tried == set(STRATEGIES) - SAME_STATE


@pytest.mark.parametrize("kind", TRIALS)
def test_at_every_position(kind: str, tmp_path: Path) -> None:
    trials = TRIALS[kind]
    expected = run_ranks(2, jobs.train_and_save, trials, str(tmp_path), timeout_s=120.0)
    found = run_ranks(2, jobs.resume_everywhere, trials, str(tmp_path), timeout_s=120.0)
    for mine, theirs in zip(expected, found, strict=True):
        for trial, digest, (name, digests) in zip(trials, mine, theirs, strict=True):
            assert name == str(trial.strategy)
            assert [at for at, _ in digests] == list(range(trial.iterations)), name
            for at, resumed in digests:
                assert resumed == digest, f"{name} resumed at iteration {at}"
