"""What rank 0 prints where a script trains otherwise than its user thinks."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.workers import rank, world_size
from harness.ranks import run_ranks

import offbeat

CASE = Case("mlp")
DIFFER = "replicas that differ"


def told(strategy: str, iterations: int, use: str, launched: bool = True) -> str:
    """Train, use the weights twice; what was printed."""
    profile = profile_of(CASE, world_size()) if launched else None
    number = rank()
    if not launched:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    with redirect_stderr(io.StringIO()) as printed:
        model = build_model(CASE)
        model, optimizer = offbeat.prepare(
            model, build_optimizer(CASE, model), strategy, profile=profile, timeout_s=20.0
        )
        for t in range(iterations):
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, number, t)).backward()
            optimizer.step()
        for _ in range(2):
            if use == "united":
                model.consolidate()
            if use == "evaluation":
                model.eval()
                with torch.no_grad():
                    model(batch(CASE, number, 0)[0])
            elif use.startswith("checkpoint"):
                offbeat.save(use.partition(":")[2], model, optimizer)
            else:
                model.state_dict()
        model.close()
    return printed.getvalue()


@pytest.mark.parametrize("use", ["state_dict", "evaluation"])
def test_replicas_that_differ_are_named_once(use: str) -> None:
    first, other = run_ranks(2, told, "local-sgd:period=4", 6, use)
    assert first.count(DIFFER) == 1
    assert DIFFER not in other


@pytest.mark.parametrize(
    ("strategy", "iterations", "use"),
    [
        ("local-sgd:period=4", 8, "state_dict"),  # just averaged
        ("local-sgd:period=4", 6, "united"),
        ("local-sgd:period=4", 6, "checkpoint"),  # each rank saves its own
        ("wfbp", 6, "state_dict"),
        ("local-sgd:period=4", 0, "state_dict"),
    ],
)
def test_equal_replicas_are_not(strategy: str, iterations: int, use: str, tmp_path: Path) -> None:
    use = f"{use}:{tmp_path}" if use == "checkpoint" else use
    assert DIFFER not in "".join(run_ranks(2, told, strategy, iterations, use))


def test_a_script_that_no_launcher_has_started_is_told_so() -> None:
    [printed] = run_ranks(1, told, "local-sgd:period=4", 2, "state_dict", False)
    assert printed.count("nothing is averaged") == 1
    assert DIFFER not in printed
    [printed] = run_ranks(1, told, "local-sgd:period=4", 2, "state_dict")
    assert "nothing is averaged" not in printed


def told_of_batches(strategy: str, kind: str) -> str:
    """Train for 24 iterations with batches that are of the rank, of all, or always the same."""
    number = rank()
    with redirect_stderr(io.StringIO()) as printed:
        model = build_model(CASE)
        model, optimizer = offbeat.prepare(
            model, build_optimizer(CASE, model), strategy, timeout_s=20.0
        )
        for t in range(24):
            optimizer.zero_grad()
            ours = batch(CASE, number if kind == "own" else 0, 0 if kind == "constant" else t)
            loss_of(model, *ours).backward()
            optimizer.step()
        model.close()
    return printed.getvalue()


@pytest.mark.parametrize("kind", ["own", "common", "constant"])
@pytest.mark.parametrize("strategy", ["wfbp", "dreamddp"])
def test_ranks_that_read_the_same_batches_are_told_so(strategy: str, kind: str) -> None:
    first, other = run_ranks(2, told_of_batches, strategy, kind)
    assert first.count("same batches") == (kind == "common")
    assert "same batches" not in other


def told_of_sweep(closes: bool) -> list[bool]:
    """Prepare four models, one after the other; whether each was told of those that are open."""
    found, models = [], []
    for _ in range(4):
        with redirect_stderr(io.StringIO()) as printed:
            model = build_model(CASE)
            models.append(offbeat.prepare(model, build_optimizer(CASE, model), "wfbp")[0])
        found.append("still open" in printed.getvalue())
        if closes:
            models[-1].close()
    for model in models:
        model.close()
    return found


@pytest.mark.parametrize("closes", [False, True])
def test_the_third_model_that_is_prepared_beside_open_ones_is_told_so(closes: bool) -> None:
    first, other = run_ranks(2, told_of_sweep, closes)
    assert first == [False, False, not closes, False]
    assert other == [False] * 4
