"""The script's random streams: nothing that offbeat does draws from them.

All strategies train under a default data type of half precision, which also shows that none of them
creates tensors of the default type (numbers under other settings: test_global_settings.py).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.strategy_lists import ALL, SERVED, STRATEGIES
from harness.ranks import run_world
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.core.buckets.coupling import find_coupling
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.measuring.optimizer_calls import call_s
from offbeat.core.transport.device import CPU
from offbeat.server.optimizers import require_elementwise
from offbeat.strategies import create

OBSERVED, ITERATIONS = 2, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "dear": {"update": "at_step"},  # a checkpoint in mid-run reads gradients
    "local-sgd": {"state": "averaged"},  # an optimizer is tried for the state that it keeps
}


def random_states() -> list[Any]:
    """Of torch on the host and on every GPU, of Python and of NumPy."""
    kind, numbers, *rest = np.random.get_state()
    gpus = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return [torch.get_rng_state().tolist(), gpus, random.getstate(), [kind, list(numbers), *rest]]


def train_and_compare(names: list[str], folder: Path) -> dict[str, list[str]]:
    """Per strategy what has changed a random state. Plans after the first one use its profile."""
    known = dict[str, Any]()
    return {name: changes(name, folder, known) for name in names}


@contextmanager
def half_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def changes(name: str, folder: Path, known: dict[str, Any]) -> list[str]:
    os.environ["OFFBEAT_SERVERS"] = "1" if name in SERVED else "0"
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.ones(6, 5) * torch.arange(6)[:, None]
    with half_precision():
        return changes_in_training(name, model, optimizer, x, folder, known)


def changes_in_training(
    name: str, model: Any, optimizer: Any, x: torch.Tensor, folder: Path, known: dict[str, Any]
) -> list[str]:
    before, found = random_states(), list[str]()
    measured = {"observe": OBSERVED, "min_bucket_bytes": 1}

    def compare(what: str) -> None:
        if random_states() != before:
            found.append(what)

    try:
        model, optimizer = offbeat.prepare(
            model,
            optimizer,
            create(name, SETTINGS.get(name)),
            timeout_s=20.0,
            **(name in STRATEGIES and known) or measured,
        )
    except SystemExit:  # a server, when its workers have left
        return found
    compare("prepare")
    for t in range(ITERATIONS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        compare(f"iteration {t}")
    if name in STRATEGIES and name != "ddp":
        assert offbeat.save(folder / name, model, optimizer) is not None
        compare("save")
        known.setdefault("profile", model._session.profile)
    model.consolidate()
    compare("consolidate")
    model.close()
    compare("close")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_strategy_leaves_the_random_states(world_size: int, tmp_path: Path) -> None:
    """Servers need a third rank."""
    names = [name for name in ALL if (name in SERVED) == (world_size == 3)]
    for rank in run_world(train_and_compare, world_size, names, tmp_path, timeout_s=90.0):
        assert rank == {name: [] for name in names}


class Drawing(SGD):
    """Draws from every stream in its step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.rand(1)
        random.random()
        np.random.rand()
        super().step()


def test_trials_of_an_optimizer_leave_the_random_states() -> None:
    model = nn.Linear(3, 2)
    optimizer = Drawing(model.parameters(), lr=0.1, momentum=0.9)
    before = random_states()
    assert find_coupling(optimizer) is None
    assert call_s(optimizer, CPU()) > 0
    require_elementwise(optimizer, "clock")
    flat = Flat(model, [BucketSpec("all", ("weight", "bias"))])
    StateStore(optimizer, flat).tensors(range(1))
    assert random_states() == before
