"""Optimizers that keep parameters, views or gradients in attributes of their own."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cases.models import Case, batch, build_model, loss_of, profile_of
from cases.workers import bits, prepared, rank, world_size
from offbeat import Strategy

CASE = Case("mlp")
RATE = 0.1


class Listed(torch.optim.SGD):
    """Steps a list of its parameters that it has made once, with momentum in another list."""

    def __init__(self, params: Any):
        super().__init__(params, lr=RATE)
        self._list = [p for group in self.param_groups for p in group["params"]]
        self._momentum = [torch.zeros_like(p) for p in self._list]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, momentum in zip(self._list, self._momentum, strict=True):
            if p.grad is not None:
                p.sub_(momentum.mul_(0.9).add_(p.grad).add_(p, alpha=0.01), alpha=RATE)


class Viewed(Listed):
    """Writes to views of its parameters, made once."""

    def __init__(self, params: Any):
        super().__init__(params)
        self._views = [p.data for p in self._list]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, view in zip(self._list, self._views, strict=True):
            if p.grad is not None:
                view.sub_(p.grad, alpha=RATE)


class Blocked(Listed):
    """Cuts parameters into blocks of two elements in its first step, as DistributedShampoo."""

    _blocks: list[tuple[Tensor, ...]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not hasattr(self, "_blocks"):
            self._blocks = [p.detach().view(-1).split(2) for p in self._list]
        for p, blocks in zip(self._list, self._blocks, strict=True):
            if p.grad is not None:
                for block, gradient in zip(blocks, p.grad.view(-1).split(2), strict=True):
                    block.sub_(gradient, alpha=RATE)


class Gathering(Listed):
    """Has all gradients in one tensor, which autograd fills."""

    def __init__(self, params: Any):
        super().__init__(params)
        sizes = [p.numel() for p in self._list]
        self._all = torch.zeros(sum(sizes), dtype=self._list[0].dtype)
        for p, part in zip(self._list, self._all.split(sizes), strict=True):
            p.grad = part.view(p.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parts = self._all.split([p.numel() for p in self._list])
        for p, part in zip(self._list, parts, strict=True):
            p.sub_(part.view(p.shape), alpha=RATE)


KEEPERS = {cls.__name__: cls for cls in (Listed, Viewed, Blocked, Gathering)}


def build(name: str) -> tuple[Any, torch.optim.Optimizer]:
    model = build_model(CASE)
    return model, KEEPERS[name]([p for p in model.parameters() if p.requires_grad])


def train_as_ddp(name: str, strategies: list[Strategy], steps: int) -> list[str]:
    """Bits of the weights under torch's DDP, and with each strategy, observed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = []
    for strategy in [None, *strategies]:
        model, optimizer = build(name)
        if strategy is None:
            loop(DistributedDataParallel(model), optimizer, steps)
        else:
            with prepared(model, optimizer, strategy, observe=3) as (wrapped, outer):
                loop(wrapped, outer, steps)
        found.append(bits(model))
    return found


def train(name: str, strategy: Strategy, steps: int) -> None:
    model, optimizer = build(name)
    options = {"profile": profile_of(CASE, world_size())}
    with prepared(model, optimizer, strategy, **options) as (wrapped, outer):
        loop(wrapped, outer, steps)


def fail(name: str, strategy: Strategy, given: bool) -> tuple[int, str]:
    """The step that failed, and its words; (-1, "") if none did."""
    model, optimizer = build(name)
    options = {"profile": profile_of(CASE, world_size())} if given else {"observe": 2}
    steps = 0
    try:
        warnings.filterwarnings("error", ".*has changed no weight")
        with prepared(model, optimizer, strategy, **options) as (wrapped, outer):
            for t in range(24):
                steps = t + 1
                iterate(wrapped, outer, t)
    except (ValueError, UserWarning) as error:
        return steps, str(error)
    return -1, ""


def loop(model: Any, optimizer: Any, steps: int) -> None:
    for t in range(steps):
        iterate(model, optimizer, t)


def iterate(model: Any, optimizer: Any, t: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, *batch(CASE, rank(), t)).backward()
    optimizer.step()
