"""Optimizers that do not write the weights are refused, and no training whose updates are small."""

from __future__ import annotations

from typing import Any

import torch
from cases.batches import Batch, Call
from harness.ranks import watch_ranks
from torch import Tensor, nn

import offbeat


class Stale(torch.optim.SGD):
    """Writes copies of the parameters that it was given, as some fused optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        for weights in self.kept:
            weights.sub_(1.0)


def trained(strategy: str, dtype: torch.dtype, scale: float, offbeats: bool) -> list[Tensor]:
    """Train by SGD in a linear warm-up from 0, with or without offbeat."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 1000)
    given: Any = model
    if offbeats:
        given, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    for t in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(t)).to(dtype)
        optimizer.zero_grad()
        (scale * given(x).float().square().mean()).backward()
        optimizer.step()
        warm_up.step()
    weights = [p.detach().clone() for p in model.parameters()]
    if offbeats:
        given.close()
    return weights


def stale(strategy: str) -> None:
    model = nn.Linear(3, 2)
    given, optimizer = offbeat.prepare(model, Stale(model.parameters(), 0.1), strategy)
    for _ in range(12):
        optimizer.zero_grad()
        given(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


TWO = Batch(2)
CASES = [
    (strategy, dtype, scale)
    for strategy in ("wfbp", "local-sgd:period=1")
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float32, 1e-12))
]


@TWO.each(trained, *((*case, True) for case in CASES))
def test_updates_below_the_resolution_of_the_weights_end_no_training(calls: list[Call]) -> None:
    """Both ranks read equal data, so they train as one process does."""
    for (strategy, dtype, scale), call in zip(CASES, calls, strict=True):
        right = trained(strategy, dtype, scale, False)
        for found in call.results:
            for mine, theirs in zip(found, right, strict=True):
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
                )


def test_an_optimizer_that_writes_other_memory_is_refused() -> None:
    for outcome in watch_ranks(2, stale, "wfbp"):
        assert outcome.kind == "ValueError"
        assert "Stale.step()" in outcome.error
