"""A server's arithmetic, against the equations written out in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness.parts import (
    Layout,
    Store,
    WireError,
    checked_settings,
    require_elementwise,
    settings_of,
)
from torch import Tensor, nn

SHAPES = [(3, 4), (5,), (2, 2, 2)]
WORKERS, CLOCKS = 3, 6


def parameters() -> list[nn.Parameter]:
    random_ = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(s, generator=random_, dtype=torch.float64)) for s in SHAPES]
    with torch.no_grad():
        assert made[0].numel() == 12
    return made


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": params[:1], "lr": 0.1, "weight_decay": 0.01},
        {"params": params[1:], "lr": 0.05},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9))


class Textbook:
    """SGD with momentum (as in torch: v = m v + g, x = x - lr v) and Adam, of one vector."""

    def __init__(self, x: Tensor, group: dict[str, Any]):
        self.x, self.group = x.clone(), group
        self.m, self.v, self.t = torch.zeros_like(x), torch.zeros_like(x), 0

    def step(self, g: Tensor, rate: float) -> None:
        lr = self.group["lr"] * rate
        g = g + self.group["weight_decay"] * self.x
        self.t += 1
        if "betas" in self.group:
            b1, b2 = self.group["betas"]
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * g * g
            m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
            self.x = self.x - lr * m / (v.sqrt() + self.group["eps"])
        else:
            self.m = self.group["momentum"] * self.m + g
            self.x = self.x - lr * self.m


def gradient(rank: int, clock: int) -> list[Tensor]:
    random_ = torch.Generator().manual_seed(100 * rank + clock)
    return [torch.randn(s, generator=random_, dtype=torch.float64) for s in SHAPES]


def some_order() -> list[tuple[int, int]]:
    """(rank, clock) of all pushes, every worker's in its order."""
    left = dict.fromkeys(range(WORKERS), 0)
    choose, order = random.Random(5), []
    while left:
        rank = choose.choice(list(left))
        order.append((rank, left[rank]))
        left[rank] += 1
        if left[rank] == CLOCKS:
            del left[rank]
    return order


def push(store: Store, rank: int, clock: int, tensors: list[Tensor], settings: Any) -> list[bool]:
    flats = store.layout.flats()
    for view, tensor in zip(store.layout.views(flats), tensors, strict=True):
        view.copy_(tensor)
    return [
        shard.push(rank, clock, flats[s.dtype][s.start : s.stop].clone(), settings)
        for shard in store.shards.values()
        for s in [shard.spec]
    ]


def held(stores: list[Store]) -> Tensor:
    shards = sorted(
        (shard for store in stores for shard in store.shards.values()),
        key=lambda shard: shard.spec.number,
    )
    return torch.cat([shard.parameters for shard in shards])


def made(rule: Any, make: Any, servers: int = 2) -> tuple[list[Store], Any]:
    params = parameters()
    optimizer = make(params)
    groups = [group["params"] for group in optimizer.param_groups]
    layout = Layout(groups, servers, shard_bytes=80)
    return [Store(layout, i, optimizer, rule, range(WORKERS)) for i in range(servers)], optimizer


@pytest.mark.parametrize("make", [sgd, adam])
def test_clock_applies_the_mean_of_a_clock(make: Any) -> None:
    stores, optimizer = made("clock", make)
    groups = [g for g in optimizer.param_groups for _ in g["params"]]
    expected = [Textbook(p.detach(), g) for p, g in zip(parameters(), groups, strict=True)]
    for rank, clock in some_order():
        for store in stores:
            push(store, rank, clock, gradient(rank, clock), settings_of(optimizer))
    for clock in range(CLOCKS):
        for i, one in enumerate(expected):
            one.step(sum(gradient(r, clock)[i] for r in range(WORKERS)) / WORKERS, 1.0)
    theirs = torch.cat([one.x.flatten() for one in expected])
    torch.testing.assert_close(held(stores), theirs, rtol=1e-12, atol=1e-12)
    assert [store.lowest_clock for store in stores] == [CLOCKS, CLOCKS]


@pytest.mark.parametrize("make", [sgd, adam])
def test_push_applies_each_at_once_with_a_share_of_the_rate(make: Any) -> None:
    stores, optimizer = made("push", make)
    groups = [g for g in optimizer.param_groups for _ in g["params"]]
    expected = [Textbook(p.detach(), g) for p, g in zip(parameters(), groups, strict=True)]
    for rank, clock in some_order():
        for store in stores:
            push(store, rank, clock, gradient(rank, clock), settings_of(optimizer))
        for i, one in enumerate(expected):
            one.step(gradient(rank, clock)[i], 1 / WORKERS)
    theirs = torch.cat([one.x.flatten() for one in expected])
    torch.testing.assert_close(held(stores), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 1, 2)])
def test_settings_travel_with_the_push_and_the_lowest_rank_decides(order: tuple[int, ...]) -> None:
    stores, optimizer = made("clock", sgd, servers=1)
    before = held(stores).clone()
    ones = [torch.ones(s, dtype=torch.float64) for s in SHAPES]
    for rank in order:
        settings = [
            {**group, "lr": 1.0 if rank == 0 else 9.0, "weight_decay": 0.0, "momentum": 0.0}
            for group in settings_of(optimizer)
        ]
        push(stores[0], rank, 0, ones, settings)
    torch.testing.assert_close(held(stores), before - 1.0)


def test_a_push_counts_once() -> None:
    stores, optimizer = made("push", sgd, servers=1)
    settings = settings_of(optimizer)
    assert all(push(stores[0], 0, 0, gradient(0, 0), settings))
    after = held(stores).clone()
    assert not any(push(stores[0], 0, 0, gradient(0, 0), settings))
    assert torch.equal(held(stores), after)


def test_the_clock_of_a_worker_is_the_lowest_of_its_shards() -> None:
    [store], _ = made("clock", sgd, servers=1)
    first, *others = store.shards.values()
    assert others
    first.skip(0, 0)
    assert store.clocks() == {0: 0, 1: 0, 2: 0}
    for shard in others:
        shard.skip(0, 0)
    assert store.clocks() == {0: 1, 1: 0, 2: 0}


def test_a_new_process_begins_after_the_pushes_of_the_earlier_one() -> None:
    """Not at the lowest clock of all workers, where its pushes would not count."""
    stores, optimizer = made("push", sgd, servers=1)
    for clock in range(2):
        push(stores[0], 0, clock, gradient(0, clock), settings_of(optimizer))
    assert stores[0].lowest_clock == 0
    assert stores[0].welcome(0, 0, fresh=True) == 2


def test_who_leaves_holds_nobody_up_and_what_was_pushed_stays() -> None:
    stores, optimizer = made("clock", sgd, servers=1)
    settings, (store,) = settings_of(optimizer), stores
    before = held(stores).clone()
    ones = [torch.ones(s, dtype=torch.float64) for s in SHAPES]
    threes = [3 * one for one in ones]
    plain = [{**s, "weight_decay": 0.0, "lr": 1.0} for s in settings]
    push(store, 0, 0, ones, plain)
    push(store, 1, 0, threes, plain)
    assert torch.equal(held(stores), before)  # rank 2 has not reached it
    store.leave(2)
    torch.testing.assert_close(held(stores), before - 2.0)
    assert store.lowest_clock == 1
    assert store.welcome(2, 0, fresh=False) == 1  # it comes back where the others are


def test_without_a_gradient_nothing_moves() -> None:
    """Weight decay and momentum included, unless somebody has one."""
    stores, optimizer = made("clock", sgd, servers=1)
    (store,), settings = stores, settings_of(optimizer)
    before = held(stores).clone()
    for rank in range(WORKERS):
        for shard in store.shards.values():
            size = shard.spec.stop - shard.spec.start
            missing = [0, 1, 2] if rank else [1, 2]
            shard.push(rank, 0, torch.zeros(size, dtype=torch.float64), settings, missing)
    after = held(stores)
    torch.testing.assert_close(after[:12], before[:12] * (1 - 0.1 * 0.01))
    assert torch.equal(after[12:], before[12:])


@pytest.mark.parametrize("settings", [{"betas": 0.9}, {"lr": [0.1]}])
def test_sequences_and_numbers_are_not_exchanged(settings: dict[str, Any]) -> None:
    optimizer = adam(parameters())
    assert checked_settings([{"betas": [0.5, 0.9], "lr": 0.1}], optimizer)
    with pytest.raises(WireError, match="must be a sequence on both sides or on none"):
        checked_settings([settings], optimizer)


def test_state_of_before_is_taken_over() -> None:
    """An optimizer that has stepped goes on: momentum is cut with its parameter."""
    params, whole = parameters(), parameters()
    optimizer, alone = sgd(params), sgd(whole)
    for some, opt in ((params, optimizer), (whole, alone)):
        for p, g in zip(some, gradient(0, 0), strict=True):
            p.grad = g
        opt.step()
    layout = Layout([group["params"] for group in optimizer.param_groups], 1, 80)
    store = Store(layout, 0, optimizer, "clock", [0])
    push(store, 0, 0, gradient(0, 1), settings_of(optimizer))
    for p, g in zip(whole, gradient(0, 1), strict=True):
        p.grad = g
    alone.step()
    torch.testing.assert_close(held([store]), torch.cat([p.detach().flatten() for p in whole]))


class Lars(torch.optim.SGD):
    """Its step depends on a norm of the whole parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


def test_optimizers_that_cannot_be_cut() -> None:
    require_elementwise(sgd(parameters()), "push")
    require_elementwise(adam(parameters()), "clock")
    with pytest.raises(ValueError, match="depends on other elements"):
        require_elementwise(Lars(parameters(), lr=0.1), "clock")
