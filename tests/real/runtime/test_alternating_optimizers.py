"""Several optimizers of one model that step in different iterations, beside torch's DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.workers import rank
from harness.ranks import run_ranks, watch_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

ITERATIONS = 14  # the first ones are observed


def trained(strategy: str | None, order: str) -> tuple[list[Tensor], int]:
    """Weights, and the counted iterations. The second optimizer steps in every other iteration,
    before or after the first one, with the gradients of both."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    often: Any = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    seldom: Any = torch.optim.AdamW(model[2].parameters(), 1e-2)
    if strategy is None:
        given: Any = DistributedDataParallel(model)
    else:
        given, (often, seldom) = offbeat.prepare(model, [often, seldom], strategy)
    for t in range(ITERATIONS):
        random = torch.Generator().manual_seed(10 * t + rank())
        given(torch.randn(6, 4, generator=random)).square().mean().backward()
        both = [often, seldom] if order == "later" else [seldom, often]
        for optimizer in both if t % 2 else [often]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    weights, count = [p.detach().clone() for p in model.parameters()], ITERATIONS
    if strategy is not None:
        count = offbeat.iteration(given)
        given.close()
    return weights, count


def beside_ddp(strategy: str, order: str) -> Any:
    dist.init_process_group("gloo")
    right, _ = trained(None, order)
    return right, *trained(strategy, order)


@pytest.mark.parametrize("order", ["earlier", "later"])
@pytest.mark.parametrize("strategy", ["wfbp", "dear"])
def test_no_update_is_lost(strategy: str, order: str) -> None:
    for right, found, count in run_ranks(2, beside_ddp, strategy, order):
        assert all(a.equal(b) for a, b in zip(right, found, strict=True))
        assert ITERATIONS - 1 <= count <= ITERATIONS  # the last one may still be open


def stepping_in_backward(strategy: str) -> None:
    """One optimizer per parameter, stepped and cleared as soon as the gradient is there."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    own = list(model.parameters())
    given, optimizers = offbeat.prepare(model, [torch.optim.SGD([p], 0.1) for p in own], strategy)
    for p, optimizer in zip(own, optimizers, strict=True):

        def act(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(act)
    given(torch.ones(6, 4)).square().mean().backward()


@pytest.mark.parametrize("strategy", ["wfbp", "dear", "local-sgd"])
def test_a_step_within_backward_is_refused(strategy: str) -> None:
    for outcome in watch_ranks(2, stepping_in_backward, strategy):
        assert outcome.kind == "ValueError"
        assert "backward" in outcome.error
