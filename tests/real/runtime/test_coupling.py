"""Coupling: optimizers whose step of one parameter depends on the others are found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import guards as support
from cases import keepers
from harness.ranks import in_turn, run_ranks
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offbeat import BSP, WFBP, ByteScheduler, LocalSGD, PartialSync, Strategy
from offbeat.core.buckets.coupling import find_coupling
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.measuring.optimizer_calls import call_s
from offbeat.core.transport.device import device_of


class Clipped(SGD):
    """Clips by the norm of all gradients inside its step."""

    limit = 1.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, self.limit)
        return super().step(closure)


class Loosely(Clipped):
    """Only clips what is far larger than usual."""

    limit = 1000.0


class PerGroup(SGD):
    """Clips each group by itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        return super().step(closure)


class Layerwise(SGD):
    """Each parameter by its own norm, as LARS."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= p.norm() / p.grad.norm()
        return super().step(closure)


class Noisy(SGD):
    """Rounds at random."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.rand_like(p)
        return super().step(closure)


class Wrapper(Optimizer):
    def __init__(self, inner: Optimizer):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Picky(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise KeyError("a parameter that it does not know")


def parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.ones(4, 5)),
        nn.Parameter(torch.ones(5)),
        nn.Parameter(torch.ones(())),
    ]


Build = Callable[[Iterable[Any]], Optimizer]


@pytest.mark.parametrize(
    "build",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: SGD(p, lr=0.0, foreach=True),
        lambda p: Adam(p, lr=torch.tensor(1e-3), amsgrad=True),
        lambda p: AdamW(p, foreach=True, maximize=True),
        lambda p: AdamW(p, fused=True),
        lambda p: Adam([{"params": list(p)[:1], "lr": 0.2}, {"params": []}], lr=0.1),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        Layerwise,
        Noisy,
    ],
)
def test_independent_ones_pass(build: Build) -> None:
    assert find_coupling(build(parameters())) is None


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda p: Clipped(p, lr=0.1), "Clipped steps a parameter differently if"),
        (lambda p: Clipped(p, lr=0.0), "Clipped steps a parameter differently if"),
        (lambda p: Loosely(p, lr=1e-9), "Loosely steps a parameter differently if"),
        (lambda p: PerGroup([{"params": [x]} for x in p], lr=0.1), "PerGroup steps a parameter"),
        (lambda p: Wrapper(SGD(p, lr=0.1)), "Wrapper calls the step of another optimizer"),
        (
            lambda p: Picky(p, lr=0.1),
            "Picky failed in a trial step on synthetic parameters ('a param",
        ),
    ],
)
def test_coupled_ones_are_found(build: Build, text: str) -> None:
    assert text in (find_coupling(build(parameters())) or "")


def test_an_optimizer_that_fails_in_a_trial_step_has_the_state_that_it_holds() -> None:
    """Its tensors of the shape of a parameter, by the first parameter of the group with a state."""
    first, second, _ = parameters()
    optimizer = Picky([first, second], lr=0.1)
    flat: Any = SimpleNamespace(buckets=[SimpleNamespace(parameters=[p]) for p in (first, second)])
    store = StateStore(optimizer, flat)
    with pytest.raises(ValueError, match="a parameter that it does not know"):
        store.bytes_of(0)  # nothing is known yet
    optimizer.state[second] = {"memory": torch.ones_like(second), "count": torch.ones(())}
    assert [store.bytes_of(b) for b in range(2)] == [first.nbytes, second.nbytes]
    assert torch.equal(first, torch.ones_like(first))


def test_nothing_of_the_user_is_touched() -> None:
    mine = parameters()
    optimizer = Adam(mine, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    random = torch.get_rng_state()
    assert find_coupling(optimizer) is None
    assert calls == []
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in mine)
    assert optimizer.param_groups[0]["params"] == mine
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ByteScheduler(), "cannot step bucket by bucket; use a strategy that steps at once"),
        (PartialSync(2), "use average='before_update'"),
        (WFBP(), ""),
    ],
    ids=str,
)
def test_refused_where_buckets_step_alone(strategy: Strategy, text: str) -> None:
    [words] = run_ranks(1, support.refuse, Clipped, strategy)
    assert text in words
    assert bool(words) == bool(text)


# ---- attributes of their own ----------------------------------------------------------------


@pytest.mark.parametrize("name", keepers.KEEPERS)
def test_trials_change_nothing_that_an_optimizer_keeps(name: str) -> None:
    model, optimizer = keepers.build(name)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad.fill_(1.0)
    mine = [*model.parameters(), *optimizer._momentum]  # type: ignore[attr-defined]
    mine += [p.grad for p in model.parameters() if p.grad is not None]
    before = [(t, t.data_ptr(), t.clone()) for t in mine]
    assert find_coupling(optimizer) is not None
    call_s(optimizer, device_of(torch.device("cpu")))
    for tensor, place, value in before:
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, value)


def test_a_list_of_parameters_is_stepped_once_per_step() -> None:
    """Weights are those of torch's DDP, bit for bit, though its trial copies share the list."""
    for found in run_ranks(2, keepers.train_as_ddp, "Listed", [WFBP(), BSP()], 8):
        assert len(set(found)) == 1


def test_views_made_before_parameters_moved_are_refused() -> None:
    calls = [
        ("Viewed", WFBP(), True),
        ("Viewed", LocalSGD(2), False),
        ("Blocked", WFBP(), False),
        ("Listed", PartialSync(2), True),
        ("Blocked", WFBP(), True),
    ]
    [found] = run_ranks(1, in_turn, keepers.fail, calls)
    assert [step for step, _ in found] == [20, 22, 22, 0, -1]
    assert all("param_groups" in text or "param groups" in text for step, text in found[:-1])
