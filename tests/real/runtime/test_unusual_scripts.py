"""Scripts that public reports describe, under several strategies: trained as under torch's DDP, or
refused by an error that names the cause.

A row is a script and the errors that it ends with. Under all other strategies its weights must
equal those under DDP: with other data per rank where gradients are averaged, with the same data on
all ranks where parameters are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.workers import rank
from harness.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import offbeat

ITERATIONS, OBSERVED = 8, 3
TOLERANCE = 5e-7  # of sums in another order
GRADIENTS, PARAMETERS = ("wfbp", "dear"), ("dreamddp", "local-sgd:period=1")
TRAINED = (*GRADIENTS, *PARAMETERS)
ALL = (*TRAINED, "a2cid2")  # its workers average at random times, so it is only run where refused
DDP = ""


@dataclass
class Run:
    """One training of a script under a strategy, or under `DDP`."""

    strategy: str
    alike: bool  # whether all ranks read the same data
    options: dict[str, Any] = field(default_factory=dict)
    opened: list[Any] = field(default_factory=list)

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        if self.strategy == DDP:
            with warnings.catch_warnings(action="ignore"):  # the option has a new name
                return DistributedDataParallel(model, broadcast_buffers=False), optimizer
        options = {"observe": OBSERVED, "min_bucket_bytes": 1, "timeout_s": 20.0} | self.options
        made = offbeat.prepare(model, optimizer, self.strategy, **options)
        self.opened.append(made[0])
        return made

    def random(self, t: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * t + (0 if self.alike else rank()))

    def loss(self, model: Any, t: int) -> Tensor:
        x = torch.randn(6, 5, generator=self.random(t))
        return cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1, 2]))

    def iterate(self, model: Any, optimizer: Any, t: int) -> None:
        optimizer.zero_grad()
        self.loss(model, t).backward()
        optimizer.step()


def mlp() -> Any:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


# ---- scripts --------------------------------------------------------------------------------


def forward_writes_weight(run: Run) -> nn.Module:
    """Rows of an embedding are scaled when they are looked up."""
    inner = nn.Sequential(nn.EmbeddingBag(12, 5, max_norm=1.0), nn.Linear(5, 3))
    model, optimizer = run.prepare(inner, sgd(inner))
    for t in range(ITERATIONS):
        rows = torch.randint(0, 12, (6, 2), generator=run.random(t))
        optimizer.zero_grad()
        cross_entropy(model(rows), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
        optimizer.step()
    return inner


def sparse_buffer(run: Run) -> nn.Module:
    inner = mlp()
    inner.register_buffer("edges", torch.eye(2).to_sparse())
    run.prepare(inner, sgd(inner))
    return inner


class Positions(nn.Module):
    """Its buffer grows with the longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("table", torch.ones(2, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n > len(self.table):
            self.register_buffer("table", torch.arange(n).cos()[:, None], persistent=False)
        return self.head((x * self.table[:n]).mean(1))


def grown_buffer(run: Run) -> nn.Module:
    inner = Positions()
    model, optimizer = run.prepare(inner, sgd(inner))
    for t in range(ITERATIONS):
        x = torch.randn(4, 3 + t * (1 if run.alike else 1 + rank()), 4, generator=run.random(t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return inner


def grown_buffer_of_its_own(run: Run) -> nn.Module:
    run.options = {"broadcast_buffers": False}
    return grown_buffer(run)


def step_in_backward(run: Run) -> nn.Module:
    """One optimizer per parameter, stepped as soon as the gradient is there."""
    inner = mlp()
    own = list(inner.parameters())
    model, optimizers = run.prepare(inner, [torch.optim.SGD([p], 0.1) for p in own])
    for p, optimizer in zip(own, optimizers, strict=True):

        def act(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(act)
    run.loss(model, 0).backward()
    return inner


def state_on_one_rank(run: Run) -> nn.Module:
    """Only rank 0 loads the optimizer's checkpoint."""
    inner = mlp()
    optimizer = torch.optim.Adam(inner.parameters())
    if rank() == 0:
        run.loss(inner, 0).backward()
        optimizer.step()
    run.prepare(inner, optimizer)
    return inner


def scripted(run: Run) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        inner = nn.Sequential(torch.jit.script(nn.Linear(5, 3)))
    run.prepare(inner, sgd(inner))
    return inner


class Divided(torch.optim.Optimizer):
    """Each rank updates a part of the parameters and sends them, as distributed Muon does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i % 2 == dist.get_rank():
                sum_ = self.state[p].setdefault("sum", torch.zeros_like(p))
                p.sub_(sum_.mul_(0.9).add_(p.grad), alpha=0.1)
            dist.broadcast(p, i % 2)


def divided_optimizer(run: Run) -> nn.Module:
    inner = mlp()
    model, optimizer = run.prepare(inner, Divided(inner.parameters()))
    for t in range(ITERATIONS):
        run.iterate(model, optimizer, t)
    return inner


def averaging_optimizer(run: Run) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # it uses torch.jit
        from torch.distributed.optim import PostLocalSGDOptimizer
    inner = mlp()
    run.prepare(inner, PostLocalSGDOptimizer(sgd(inner), SimpleNamespace()))  # type: ignore[arg-type]
    return inner


def every_other_step(run: Run) -> nn.Module:
    """One of two optimizers steps in every other iteration, after or before the other one."""
    inner = mlp()
    often: Any = torch.optim.SGD(inner[0].parameters(), 0.1, momentum=0.9)
    seldom: Any = torch.optim.AdamW(inner[2].parameters(), 1e-2)
    model, (often, seldom) = run.prepare(inner, [often, seldom])
    for t in range(ITERATIONS):
        run.loss(model, t).backward()
        both = [often, seldom] if t % 4 == 1 else [seldom, often]
        for optimizer in both if t % 2 else [often]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    if run.strategy != DDP:  # the last iteration may still be open
        assert ITERATIONS - 1 <= offbeat.iteration(model) <= ITERATIONS
    return inner


class Private(torch.optim.SGD):
    """Takes gradients from an attribute of the parameters, as for differential privacy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad_sample
        super().step()


def private_gradients(run: Run) -> nn.Module:
    inner = mlp()
    model, optimizer = run.prepare(inner, Private(inner.parameters(), 0.1))
    for t in range(ITERATIONS):
        optimizer.zero_grad()
        run.loss(model, t).backward()
        for p in inner.parameters():
            p.grad_sample = torch.ones_like(p)
        optimizer.step()
    return inner


def ignored_parameters(run: Run) -> nn.Module:
    inner = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["2.bias"])
    run.prepare(inner, sgd(inner))
    return inner


def warm_up_in_bfloat16(run: Run) -> nn.Module:
    """The first updates are smaller than the resolution of the weights."""
    inner = mlp().to(torch.bfloat16)
    model, optimizer = run.prepare(inner, torch.optim.SGD(inner.parameters(), 1e-3))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 1000)
    for t in range(ITERATIONS):
        x = torch.randn(6, 5, generator=run.random(t)).to(torch.bfloat16)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        schedule.step()
    return inner


def _swap(run: Run, act: Callable[[Any, Any, int], object], *, copies: bool = False) -> nn.Module:
    """Use averaged weights by `p.data = ...` in some iterations, and put the weights back."""
    own = list((inner := mlp()).parameters())
    model, optimizer = run.prepare(inner, torch.optim.SGD(own, 0.1, momentum=0.9))
    averaged, places = [p.detach().clone() for p in own], set[int]()
    for t in range(ITERATIONS):
        run.iterate(model, optimizer, t)
        for mean, p in zip(averaged, own, strict=True):
            mean.lerp_(p.detach(), 0.1)
        if t % OBSERVED == 0:
            kept = [p.data.clone() if copies and i else p.data for i, p in enumerate(own)]
            for p, mean in zip(own, averaged, strict=True):
                p.data = mean
            act(model, optimizer, 100 + t)
            for p, weights in zip(own, kept, strict=True):
                p.data = weights
        places.add(own[0].data_ptr())
    assert len(places) <= 2, "memory before and after the observed iterations"
    return inner


def weights_swapped_for_evaluation(run: Run) -> nn.Module:
    def evaluate(model: Any, _: Any, t: int) -> None:
        model.eval()
        with torch.no_grad():
            run.loss(model, t)
        model.train()

    return _swap(run, evaluate)


def weights_swapped_for_an_iteration(run: Run) -> nn.Module:
    return _swap(run, run.iterate, copies=True)


# ---- table ----------------------------------------------------------------------------------

Script = Callable[[Run], nn.Module]
# Script, strategies that refuse it, type of the error, and what the error names.
ROWS: Sequence[tuple[Script, Sequence[str], str, str]] = [
    (forward_writes_weight, GRADIENTS, "RuntimeError", "max_norm"),
    (sparse_buffer, ALL, "ValueError", "'edges'"),
    (grown_buffer, GRADIENTS, "ValueError", "'table'"),
    (grown_buffer_of_its_own, (), "", ""),
    (step_in_backward, TRAINED, "ValueError", "backward"),
    (state_on_one_rank, ALL, "ValueError", "'0.weight."),
    (scripted, ALL, "ValueError", "ScriptModule"),
    (divided_optimizer, ALL[1:], "ValueError", "Divided"),
    (averaging_optimizer, ALL, "ValueError", "PostLocalSGDOptimizer"),
    (every_other_step, (), "", ""),
    (private_gradients, ALL, "ValueError", "Private"),
    (ignored_parameters, ALL, "ValueError", "2.bias"),
    (warm_up_in_bfloat16, (), "", ""),
    (weights_swapped_for_evaluation, (), "", ""),
    (weights_swapped_for_an_iteration, TRAINED[1:], "ValueError", "p.data.copy_"),
]


def _weights(script: Script, strategy: str, *, alike: bool) -> list[Tensor]:
    torch.manual_seed(0)
    run = Run(strategy, alike)
    try:
        return [p.detach().clone() for p in script(run).parameters()]
    finally:
        for model in run.opened:
            model.close()


def outcomes(script: Script, refused: Sequence[str]) -> dict[str, tuple[float, str, str]]:
    """By strategy the largest difference from DDP, or type and text of the error."""
    dist.init_process_group("gloo")
    found: dict[str, tuple[float, str, str]] = {}
    right: dict[bool, list[Tensor]] = {}
    for strategy in dict.fromkeys((*TRAINED, *refused)):
        alike = strategy in PARAMETERS
        try:
            weights = _weights(script, strategy, alike=alike)
        except Exception as error:
            found[strategy] = 0.0, type(error).__name__, str(error)
            continue
        if alike not in right:
            right[alike] = _weights(script, DDP, alike=alike)
        pairs = zip(weights, right[alike], strict=True)
        found[strategy] = max(float((a - b).abs().max()) for a, b in pairs), "", ""
    return found


@pytest.mark.parametrize(
    ("script", "refused", "kind", "named"), ROWS, ids=[row[0].__name__ for row in ROWS]
)
def test_trained_as_under_ddp_or_refused(
    script: Script, refused: Sequence[str], kind: str, named: str
) -> None:
    for of_rank in run_ranks(2, outcomes, script, refused):
        for strategy, (difference, error, text) in of_rank.items():
            assert error == (kind if strategy in refused else ""), (strategy, text)
            assert named in text or strategy not in refused, (strategy, text)
            assert difference <= TOLERANCE, strategy
