"""Buffers that forward writes and reads: rank 0's on all ranks, as under torch's DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.workers import prepared, rank
from harness.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.core.derive.broadcast import with_broadcast, without_broadcast
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.verify.check import raise_if_wrong
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict, simulate
from offbeat.strategies import BSP, P3, WFBP, DeAR, LocalSGD, Strategy
from offbeat.testing import inspect

ITERATIONS = 8


class RunningNorm(nn.Module):
    """Normalizes by statistics that each forward updates before it uses them, past version
    counters, and counts samples in integers of other sizes."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.ones(size, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            rows = x.detach()
            self.count += len(x)
            self.odd[0] = (int(self.odd[0]) + len(x)) % 100
            self.mean.data.lerp_(rows.mean(0), 0.1 + float(self.odd[0]) / 1000)
            self.square = self.square.lerp(rows.double().square().mean(0), 1 / float(self.count))
        return (x - self.mean) / self.square.float().sqrt()


def network() -> nn.Module:
    """Also with batch normalization, which does not read its statistics in training."""
    torch.manual_seed(5)
    return nn.Sequential(
        RunningNorm(5), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), RunningNorm(8),
        nn.Linear(8, 3),
    )  # fmt: skip


def batch(t: int, micro: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(1000 * t + 100 * micro + rank())
    return rank() + torch.randn(6 + rank(), 5, generator=random)


def loop(model: Any, optimizer: Any, way: str, iterations: range) -> list[float]:
    """Losses, and outputs of an evaluation after each step, on this rank."""
    seen = []
    for t in iterations:
        optimizer.zero_grad()
        if way == "accumulation" and t % 2:
            with model.no_sync():
                model(batch(t, 1)).square().mean().backward()
        elif way == "two backwards":
            model(batch(t, 1)).square().mean().backward()
        loss = model(batch(t)).square().mean()
        loss.backward()
        optimizer.step()
        if way == "evaluation":
            model.eval()
            with torch.no_grad():
                seen.append(float(model(batch(99)).sum()))
            model.train()
        seen.append(float(loss.detach()))
    return seen


def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Of parameters, and of all buffers on rank 0, which are every rank's at the next forward."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    return {n: p.detach().clone() for n, p in model.named_parameters()} | buffers


def with_ddp(way: str) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = begin()
    ddp = DistributedDataParallel(model)
    seen = loop(ddp, optimizer, way, range(ITERATIONS))
    ddp.eval()
    ddp(batch(0))  # broadcasts
    return state_of(model), seen


def with_offbeat(
    way: str, strategy: Strategy, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = begin()
    options = options or {"observe": 2}
    with prepared(model, optimizer, strategy, **options) as (mine, steps):
        seen = loop(mine, steps, way, range(ITERATIONS))
        mine.flush()
        state = state_of(model)
    return state, seen


STRATEGIES: list[Strategy] = [WFBP(), P3(), DeAR(), BSP()]
# All pairs of a way and a strategy would be 16 trainings. All ways run under one strategy that
# steps at once, and under those that step in the next forward together.
PAIRS = {
    "plain": STRATEGIES,
    "accumulation": [STRATEGIES[0], STRATEGIES[1]],
    "two backwards": [STRATEGIES[0], STRATEGIES[2]],
    "evaluation": [STRATEGIES[0], STRATEGIES[1]],
}


def apart(a: Any, b: Any) -> float:
    (mine, seen), (theirs, saw) = a, b
    assert mine.keys() == theirs.keys()
    tensors = [float((mine[n].double() - theirs[n].double()).abs().max()) for n in mine]
    return max(*tensors, *(abs(x - y) for x, y in zip(seen, saw, strict=True)))


def differences(pairs: dict[str, list[Strategy]]) -> dict[Any, float]:
    """From DDP, with a measured profile and a given one."""
    dist.init_process_group("gloo")
    found = {}
    for way, strategies in pairs.items():
        yardstick = with_ddp(way)
        for strategy in strategies:
            found[way, str(strategy)] = apart(with_offbeat(way, strategy), yardstick)
    given = with_offbeat("plain", pairs["plain"][0], profile=handmade())
    found["given"] = apart(given, with_ddp("plain"))
    return found


def handmade() -> Profile:
    """Of somebody who does not know about buffers."""
    named = reversed([*network().named_parameters()])
    buckets = tuple(Bucket(n, 0.1, 0.2, p.nbytes, tensors=(n,)) for n, p in named)
    return Profile(buckets, (Link("net", 1e-3, 1e6),), dist.get_world_size())


@pytest.mark.parametrize(("world_size", "most"), [(2, 0.0), (3, 1e-5)])
def test_numbers_are_those_of_ddp(world_size: int, most: float) -> None:
    pairs = PAIRS if world_size == 2 else {"plain": STRATEGIES[1:2]}
    for found in run_ranks(world_size, differences, pairs, timeout_s=100.0):
        assert {key: value for key, value in found.items() if not value <= most} == {}


def own_buffers() -> dict[str, Any]:
    """What a rank has of its own where nothing is broadcast, and what begins to change late."""
    found: dict[str, Any] = {}
    for name, strategy, more in (
        ("off", WFBP(), {"broadcast_buffers": False, "observe": 1}),
        ("periodic", LocalSGD(period=100), {"observe": 1}),
    ):
        state, _ = with_offbeat("plain", strategy, **more)
        found[name] = {n: t for n, t in state.items() if n.endswith("mean")}
    model, optimizer = begin()
    model[0].eval()  # not written at first
    with prepared(model, optimizer, WFBP(), observe=1, compare_every=3) as (mine, steps):
        loop(mine, steps, "plain", range(3))
        seen = inspect(mine)
        model[0].train()
        loop(mine, steps, "plain", range(3, 8))
        mine.flush()
        found["late"] = {n: t for n, t in state_of(model).items() if n.endswith("mean")}
    found["sent"] = [
        sum(
            m.sent_bytes
            for m in seen.messages
            if m.iteration == t and m.transfer.verb == "broadcast"
        )
        for t in range(8)
    ]
    return found


def test_who_keeps_buffers_of_its_own() -> None:
    first, second = run_ranks(2, own_buffers)
    for name in ("off", "periodic"):
        assert all(not torch.equal(first[name][n], second[name][n]) for n in first[name])
    assert all(torch.equal(first["late"][n], second["late"][n]) for n in first["late"])
    # Only what forward writes is sent: never the masks, and the first layer's once it trains.
    assert first["sent"][2] < first["sent"][7] < sum(b.nbytes for b in network().buffers())


BUCKETS = tuple(Bucket(str(b), 0.01, 0.02, 1000) for b in range(3))
PROFILE = Profile(BUCKETS, (Link("net", 1e-3, 1e6),), world_size=4)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_broadcast_is_planned_and_costed(strategy: Strategy) -> None:
    """It is waited for, as it lasts longer than what comes between backward and forward."""
    profile = replace(PROFILE, broadcast_bytes=50_000)
    plan = strategy.plan(profile)
    raise_if_wrong(plan, profile)
    [message] = [t for t in plan.transfers if t.verb == "broadcast"]
    # A tree of two sends, each with a sixth of the ring's latency and its bytes once.
    expected_s = 2 * (1e-3 / 6 + 50_000 / 1e6 * 4 / 6)
    said_s = profile.message_s(message.payload, message.link, message.verb)
    assert said_s == pytest.approx(expected_s)
    trace = simulate(plan, profile, iterations=3, record=3)
    spans = [s for s in trace.spans if s.lane == message.link and s.rank == 0]
    assert [(s.iteration, s.kind, s.bytes) for s in spans] == [
        (i, "broadcast", 50_000) for i in range(3)
    ]
    seconds = [predict(strategy, p).iteration_s for p in (PROFILE, profile)]
    assert seconds[0] + 0.02 < seconds[1] < seconds[0] + 1.5 * expected_s
    assert all(t.verb != "broadcast" for t in strategy.plan(PROFILE).transfers)


def test_plans_that_broadcast_are_accepted() -> None:
    plan = WFBP(fusion="none").plan(PROFILE)
    raise_if_wrong(with_broadcast(plan, "net"), PROFILE)
    assert without_broadcast(with_broadcast(plan, "net")) == plan
    assert sends_only_gradients(with_broadcast(plan, "net"))


class Table(nn.Module):
    """A table of rotations that grows with the longest input of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("table", self._make(2), persistent=False)

    def _make(self, length: int) -> Tensor:
        return torch.arange(float(length))[:, None].cos().expand(-1, 4).clone()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            self.register_buffer("table", self._make(x.shape[1]), persistent=False)
        return self.layer((x * self.table[: x.shape[1]]).mean(1))


def grow(strategy: str) -> list[Tensor]:
    """Weights after 12 iterations, observed ones among them, with inputs of other lengths."""
    torch.manual_seed(0)
    model, number = Table(), rank()
    model, optimizer = offbeat.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), strategy, broadcast_buffers=False
    )
    for t in range(12):
        x = torch.randn(4, 3 + t // (1 + number), 4, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    weights = [p.detach().clone() for p in model.module.parameters()]
    model.close()
    return weights


@pytest.mark.parametrize("strategy", ["wfbp", "dear"])
def test_buffers_that_grow_unlike_others_may_if_none_is_broadcast(strategy: str) -> None:
    first, other = run_ranks(2, grow, strategy)
    assert all(a.equal(b) for a, b in zip(first, other, strict=True))
