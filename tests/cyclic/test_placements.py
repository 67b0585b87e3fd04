"""Micro-batches interleaved over processes, beside a direct transcription of the equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cyclic_support import ITERATIONS, batch, chain, equations, optimizer_of
from torch import nn
from worlds import run_world

from offbeat.cyclic import Interleaved
from offbeat.cyclic.timetable import Placement, Timetable
from offbeat.strategies import Cyclic

RULES = (
    ("sgd", Cyclic()),
    ("adam", Cyclic(rule="v1")),
    ("sgd", Cyclic(rule="random", seed=1)),
    ("adam", Cyclic(start="skip")),
    ("sgd", Cyclic(rule="v1", clip=0.1)),
)


def trained(n: int, placement: Placement, anew: int | None) -> list[Any]:
    """By rule: losses that this rank has computed, and all parameters in the end."""
    dist.init_process_group("gloo")
    found = []
    for name, strategy in RULES:
        model = chain(n)
        trainer = Interleaved(
            [*model],
            optimizer_of(name, model),
            nn.functional.mse_loss,
            strategy,
            placement,
            timeout_s=20,
        )
        losses = []
        for t in range(ITERATIONS):
            if t == anew:
                losses += trainer.finish()
            losses += trainer.step([batch(i, t) for i in range(1, n + 1)])
        losses += trainer.consolidate()
        found.append(([loss.item() for loss in losses], dict(model.state_dict())))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("placement", "n", "anew"),
    [
        ("workers", 1, None),
        ("workers", 3, None),
        ("workers", 4, 2),
        ("pyramid", 2, None),
        ("pyramid", 3, 2),
        ("pipeline", 2, None),
        ("pipeline", 4, 3),
        ("zero", 2, None),
        ("zero", 3, 2),
        ("zero", 4, None),
    ],
)
def test_equals_its_equations(placement: Placement, n: int, anew: int | None) -> None:
    ranks = run_world(trained, Timetable(placement, n).devices, n, placement, anew)
    for k, (name, strategy) in enumerate(RULES):
        expected, theta = equations(n, name, strategy, anew=anew)
        losses = sorted(loss for found in ranks for loss in found[k][0])
        torch.testing.assert_close(
            torch.tensor(losses),
            torch.tensor(expected, dtype=torch.float64).flatten().sort().values.float(),
        )
        for found in ranks:
            for key, value in found[k][1].items():
                torch.testing.assert_close(value, theta[key], rtol=0, atol=1e-12)
