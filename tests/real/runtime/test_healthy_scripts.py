"""Guards end no healthy training: each row names a guard, and a script that has looked wrong to it
or might. An optimizer that certainly has no effect is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from cases import keepers
from cases.batches import Batch, Call
from cases.workers import prepared
from torch import Tensor, nn

from offbeat import WFBP
from offbeat.profile import Bucket, Link, Profile

ITERATIONS = 24  # 20 updates without effect are needed for an error
BUCKETS = [Bucket(name, 0.5, 0.6, size) for name, size in (("2", 144), ("0", 288))]
HALVES = [Bucket(bucket.name, 0.5, 0.6, bucket.size_bytes // 2) for bucket in BUCKETS]
TWO = Batch(2)


class Seldom(torch.optim.SGD):
    """Adds up gradients, and writes the weights in every fourth step."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
            if self.calls % 4 == 0:
                p.sub_(total, alpha=0.1)
                total.zero_()


class Rarely(Seldom):
    """Uses every fourth gradient."""

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            torch.optim.SGD.step(self)


class Accumulating(torch.optim.Optimizer):
    """Calls the step of another optimizer in every fourth step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner, self.calls = torch.optim.SGD(parameters, lr), 0
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            self.inner.step()


class ByData(torch.optim.SGD):
    """Writes through `p.data`, which changes no version counter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


class WithoutRate(torch.optim.SGD):
    """Finds its rate itself, as Adafactor does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.param_groups[0].update(lr=None, momentum=None, betas=None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p)).add_(p.grad.square())
            p.sub_(p.grad, alpha=0.1)


class Stale(torch.optim.SGD):
    """Writes copies of the parameters that it was given, as some fused optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        for weights in self.kept:
            weights.sub_(1.0)


def usual(y: Tensor) -> Tensor:
    return y.float().square().mean()


def without_gradient(y: Tensor) -> Tensor:
    return 0.0 * y.sum()


def constant(y: Tensor) -> Tensor:
    return 0.0 * y.sum() + 1.0


def huge(y: Tensor) -> Tensor:
    """Gradients are finite, and their sum is not."""
    return 1e38 * y[:, 0].mean()


Row = tuple[str, str, Callable[..., Any], float, Callable[[Tensor], Tensor], torch.dtype]
SGD, F32, BF16 = torch.optim.SGD, torch.float32, torch.bfloat16
ROWS: list[Row] = [
    ("updates without effect", "wfbp", SGD, 1e-6, usual, BF16),
    ("updates without effect", "local-sgd:period=1", SGD, 1e-12, usual, F32),
    ("updates without effect", "dear", torch.optim.AdamW, 1e-12, usual, F32),
    ("updates without effect", "wfbp", SGD, 0.0, usual, F32),
    ("updates without effect", "wfbp", ByData, 1e-12, usual, F32),
    ("updates without effect", "local-sgd:period=1", ByData, 1e-6, usual, BF16),
    ("updates without effect", "wfbp", Seldom, 0.1, usual, F32),
    ("updates without effect", "local-sgd:period=1", Rarely, 0.1, usual, F32),
    ("updates without effect", "wfbp", Accumulating, 0.1, usual, F32),
    ("updates without effect", "dear", SGD, 0.1, without_gradient, F32),
    ("finite gradients", "wfbp", SGD, 1e-40, huge, F32),
    ("loss", "deft", SGD, 0.1, constant, F32),
    ("loss", "deft", SGD, 0.0, usual, F32),
    ("noise of gradients", "deft", WithoutRate, 0.1, usual, F32),
]


def trained(offbeats: bool, row: Row) -> list[Tensor]:
    """Weights with or without offbeat. Both ranks read equal data."""
    _, strategy, make, rate, loss, dtype = row
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    optimizer = make(module.parameters(), lr=rate)
    if not offbeats:
        return _weights(module, module, optimizer, loss)
    buckets = tuple(BUCKETS if dtype == F32 else HALVES)
    link = Link("net", latency_s=0.01, bytes_per_s=400.0)
    profile = Profile(buckets, (link,), world_size=2, update_s=0.1, other_s=0.1)
    with prepared(module, optimizer, strategy, profile=profile) as (model, outer):
        return _weights(module, model, outer, loss)


def _weights(module: Any, model: Any, optimizer: Any, loss: Callable[..., Tensor]) -> list[Tensor]:
    dtype = module[0].weight.dtype
    for t in range(ITERATIONS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(t)).to(dtype)
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    if model is not module:
        model.flush()
    return [p.detach().clone() for p in module.parameters()]


@TWO.each(trained, *((True, row) for row in ROWS))
def test_trained_as_without_offbeat(calls: list[Call]) -> None:
    for row, call in zip(ROWS, calls, strict=True):
        for found in call.results:
            if row[2] is WithoutRate:
                continue  # updates of deft are late
            for mine, theirs in zip(found, trained(False, row), strict=True):
                torch.testing.assert_close(mine, theirs)


def gathering() -> list[str]:
    """Warnings for an optimizer that writes the weights, with gradients that nothing fills."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        keepers.train("Gathering", WFBP(), ITERATIONS)
    return [str(one.message) for one in heard if one.category is UserWarning]


@TWO.given(gathering)
def test_an_optimizer_that_may_have_no_effect_is_warned_about(call: Call) -> None:
    for heard in call.results:
        assert [text.split(".")[0] for text in heard] == ["Gathering"]


def stale() -> None:
    module = nn.Linear(3, 2)
    with prepared(module, Stale(module.parameters(), 0.1), "wfbp", observe=2) as (model, optimizer):
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()


COUNTING: list[Row] = [("", "dear", make, 0.1, usual, F32) for make in (Seldom, Rarely)]


@TWO.each(trained, *((True, row) for row in COUNTING))
def test_an_optimizer_that_counts_its_steps_does_not_step_bucket_by_bucket(
    calls: list[Call],
) -> None:
    for row, call in zip(COUNTING, calls, strict=True):
        for outcome in call.outcomes:
            assert outcome.kind == "ValueError"
            assert row[2].__name__ in outcome.error


@TWO.given(stale)
def test_an_optimizer_that_writes_other_memory_is_refused(call: Call) -> None:
    for outcome in call.outcomes:
        assert outcome.kind == "ValueError"
        assert "Stale.step()" in outcome.error
