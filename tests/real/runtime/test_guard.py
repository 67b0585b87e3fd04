"""The convergence guard: all ranks see the same, change to the same plan, and lose no gradient."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import merging as support
from cases.batches import Batch, Call
from cases.comparing import assert_same
from cases.merging import Merging, Watched, closes_every
from cases.schedules import CASE
from harness.ranks import run_ranks
from oracle.training import Replica, apply_merged, bsp, merged, replicas

from offbeat import WFBP, DeFT
from offbeat.core.measuring.loss import LossTap, accumulation, is_accumulating
from offbeat.strategies import Strategy
from offbeat.strategies.convergence import ConvergenceGuard
from offbeat.strategies.gradient_noise import NoiseMeter, is_scale_free, step_size

WINDOW = 3
ITERATIONS = 14
GUARDED = Merging(period=2, guards=True)
RISING = {(1, t): 10.0 * t for t in range(WINDOW, ITERATIONS)}  # in one rank's loss alone
INFINITE = {(0, 4): float("inf")}


FALLING = {(r, t): -float(t) for r in (0, 1) for t in range(99)}
TWO = Batch(2)


def guards(strategy: Strategy, offsets: dict[tuple[int, int], float], *rates: Any) -> Call:
    return TWO.add(support.train_guarded, strategy, WINDOW, offsets, ITERATIONS, *rates)


NOISE, RATE = (Merging(period=2, guards=True, by=what) for what in ("noise", "rate"))
FALLS = [
    (guards(GUARDED, RISING), 3, "the loss rose to "),
    (guards(GUARDED, INFINITE), 2, "the loss is not finite"),
]
DEFT = guards(DeFT(), INFINITE)
GOES_DOWN, NOISY = guards(GUARDED, FALLING), guards(NOISE, FALLING)
TWO_RATES = guards(RATE, {}, (0.05, 0.1))


def guarded(call: Call) -> list[Watched]:
    ranks = call.results
    assert ranks[0].united == ranks[1].united
    assert ranks[0].decisions == ranks[1].decisions
    assert ranks[0].strategies == ranks[1].strategies
    assert ranks[0].periods == ranks[1].periods
    return ranks


def assert_trained_as(ranks: list[Watched], world: list[Replica]) -> None:
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine.trained, replica, f"rank {replica.rank}")


def test_falls_back_when_the_loss_departs() -> None:
    """On all ranks at once: what was merged is applied, and from then on it is WFBP."""
    for call, looks, words in FALLS:
        ranks = guarded(call)
        fell = looks * WINDOW
        names = ["merging"] * (fell - 1) + ["wfbp"] * (ITERATIONS - fell + 1)
        assert ranks[0].strategies == names
        [decision] = ranks[0].decisions
        assert words in decision[1]
        assert f"fell back from {GUARDED} to wfbp" in decision[1]
        assert decision[0] == fell
        warning = f"iteration {fell}: {decision[1]}"
        assert [w for w in ranks[0].warnings if "fell back" in w] == [warning]
        world = replicas(CASE, 2)
        merged(world, range(fell), closes_every(2))
        apply_merged(world, "sum")
        bsp(world, range(fell, ITERATIONS))
        assert_trained_as(ranks, world)


def test_deft_falls_back() -> None:
    ranks = guarded(DEFT)
    assert ranks[0].strategies[-1] == "wfbp"
    [decision] = [d for d in ranks[0].decisions if "fell back" in d[1]]
    assert decision == ranks[0].decisions[-1]


@TWO.each(support.without_a_window, *((DeFT(), observed, ITERATIONS) for observed in (False, True)))
def test_deft_without_a_window_runs_wfbp(calls: list[Call]) -> None:
    """On all ranks, and rank 0 says it once."""
    for ranks in (call.results for call in calls):
        for mine in ranks:
            assert mine.strategies == ["wfbp"]
            assert all("does not fit into backward" in line for line in mine.warnings)
        assert [len(mine.warnings) for mine in ranks] == [1, 0]
        world = replicas(CASE, 2)
        bsp(world, range(ITERATIONS))
        assert_trained_as(ranks, world)


def test_nothing_happens_to_a_loss_that_goes_down() -> None:
    ranks = guarded(GOES_DOWN)
    assert ranks[0].decisions == []
    world = replicas(CASE, 2)
    merged(world, range(ITERATIONS), closes_every(2))
    assert_trained_as(ranks, world)


def test_plans_again_when_the_noise_says_so() -> None:
    """After the first window in which a generation was applied, and none lost; no warning."""
    ranks = guarded(NOISY)
    known = 2 * WINDOW
    assert ranks[0].periods == [2] * (known - 1) + [3] * (ITERATIONS - known + 1)
    [decision] = ranks[0].decisions
    assert "planned again, the gradient noise changed" in decision[1]
    assert not [w for w in ranks[0].warnings if "planned again" in w]
    world = replicas(CASE, 2)
    merged(world, range(known), closes_every(2))
    apply_merged(world, "sum")
    merged(world, range(known, ITERATIONS), closes_every(3))
    assert_trained_as(ranks, world)


def test_ranks_with_different_rates_plan_alike() -> None:
    """As a schedule by each rank's own loss makes them; the plan depends on the rate."""
    first, second = TWO_RATES.results
    assert first.periods == second.periods
    assert first.united == second.united


class Alone:
    """A control group of one."""

    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_looks_after_two_windows_of_ten() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    engine, planner = SimpleNamespace(control=Alone(), optimizer=optimizer), Mock()
    guard = ConvergenceGuard(engine, planner, WFBP())  # type: ignore[arg-type]
    looks = {}
    try:
        for t in range(40):
            loss_of(1.0 if t < 10 else 5.0).backward()
            finding = guard.iteration()
            if finding is not None:
                looks[t + 1] = finding.problem
    finally:
        guard.close()
    assert looks[20] is None  # high in one window
    assert looks[40].startswith(
        "the loss rose to 5 (mean of 10 iterations), above 1.1 in 2 windows"
    )
    assert len(looks) == 2


# ---- the meter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("ranks", [2, 5])
def test_noise_meter_is_unbiased(ranks: int, merge: int) -> None:
    """Against gradients of a known mean and covariance, in two buckets."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(7, generator=generator, dtype=torch.float64)
    deviation = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5
    trials, found = 3000, []
    meters = [NoiseMeter(ranks) for _ in range(ranks)]
    for _ in range(trials):
        noise = torch.randn(merge, ranks, 7, generator=generator, dtype=torch.float64)
        grads = (mean + deviation * noise).sum(dim=0)
        for meter, grad in zip(meters, grads, strict=True):
            meter.add_own([grad[:3]])
            meter.add_own([grad[3:]])
            meter.complete()
            meter.add_average([grads.mean(dim=0)], merge)
        values = [meter.take() for meter in meters]
        found.append([sum(v[i] for v in values if v) / ranks for i in (0, 1)])
    estimates = torch.tensor(found, dtype=torch.float64)
    truth = torch.stack([mean.square().sum(), deviation.square().sum() / ranks])
    errors = (estimates.mean(dim=0) - truth).abs()
    assert (errors < 4 * estimates.std(dim=0) / trials**0.5).all()
    assert (errors < 0.1 * truth).all()  # else the first line could hold of anything


def test_noise_meter_keeps_generations_apart() -> None:
    """One more is completed before the first is averaged, and nothing is told twice."""
    meter = NoiseMeter(2)
    assert meter.take() is None
    for size in (3.0, 5.0):
        meter.add_own([torch.tensor([size])])
        meter.complete()
    meter.add_average([torch.tensor([2.0])], 1)
    assert meter.take() == (4.0 - 5.0, 5.0)
    meter.add_average([torch.tensor([4.0])], 2)
    assert meter.take() == ((16.0 - 9.0) / 4, 9.0 / 2)
    assert meter.take() is None


def test_consolidate_leaves_the_meter_in_step() -> None:
    """Gradients that are three times as large after it are measured as just that."""
    strategy = Merging(period=2, guards=True)
    for before, after in run_ranks(2, support.noise_around_a_pause, strategy, 7):
        assert after == pytest.approx([9 * value for value in before])


def test_step_size_is_what_a_constant_gradient_moves() -> None:
    for settings in ({}, {"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.2}):
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=0.1, **settings)
        before = 0.0
        for _ in range(300):
            before = parameter.item()
            parameter.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
        assert step_size(optimizer) == pytest.approx(before - parameter.item())
        assert not is_scale_free(optimizer)


def test_step_size_of_adam_is_what_it_moves() -> None:
    """The rate, however large the gradient: so a sum of two moves no further than one."""
    for kind, size in ((torch.optim.Adam, 0.02), (torch.optim.AdamW, 5.0)):
        parameter = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        optimizer = kind([parameter], lr=0.1, weight_decay=0.0)
        assert not is_scale_free(optimizer)  # not known before its first step
        for _ in range(5):
            before = parameter.detach().clone()
            parameter.grad = torch.full((3,), size, dtype=torch.float64)
            optimizer.step()
        assert is_scale_free(optimizer)
        moved = (before - parameter.detach()) / size
        assert moved.tolist() == pytest.approx([step_size(optimizer)] * 3)


# ---- the tap ------------------------------------------------------------------------------------


def test_taps_may_be_closed_in_any_order() -> None:
    original = torch.Tensor.backward
    for order in permutations(range(3)):
        taps = [LossTap() for _ in order]
        try:
            for closed, i in enumerate(order):
                loss_of(float(closed + 1)).backward()
                for tap in (taps[j] for j in order[closed:]):
                    assert float(tap.take() or 0.0) == closed + 1
                taps[i].close()
                loss_of(9.0).backward()
                assert taps[i].take() is None
                for j in order[closed + 1 :]:
                    taps[j].take()
            assert torch.Tensor.backward is original
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]


def test_tap_takes_scalars_only() -> None:
    tap = LossTap()
    try:
        loss_of(2.0).backward()
        torch.ones(3, requires_grad=True).backward(torch.ones(3))
        assert float(tap.take() or 0.0) == 2.0
        assert tap.take() is None
    finally:
        tap.close()


def test_tap_keeps_a_copy_of_the_loss() -> None:
    """The script may change its tensor in place before the loss is read."""
    tap, loss = LossTap(), loss_of(2.0)
    try:
        loss.backward()
        loss.detach().zero_()
        assert float(tap.take() or 0.0) == 2.0
    finally:
        tap.close()


def test_tap_keeps_a_loss_of_one_element_as_a_scalar() -> None:
    tap = LossTap()
    try:
        loss_of(3.0).reshape(1).backward()
        found = tap.take()
    finally:
        tap.close()
    assert found is not None
    assert (found.shape, float(found)) == ((), 3.0)


def test_tap_adds_the_losses_of_an_accumulation() -> None:
    """Those within `accumulation`, and the next one; other backward passes replace the loss."""
    tap, scaler = LossTap(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    try:
        loss_of(9.0).backward()
        for value in (1.0, 2.0):
            with accumulation():
                scaler.scale(loss_of(value)).backward()
        assert not is_accumulating()
        loss_of(4.0).reshape(1).backward()
        assert float(tap.take() or 0.0) == 7.0
        with accumulation():
            loss_of(8.0).backward()
        assert float(tap.take() or 0.0) == 8.0
        loss_of(3.0).backward()
        loss_of(5.0).backward()
        assert float(tap.take() or 0.0) == 5.0
    finally:
        tap.close()


def test_tap_takes_the_loss_before_its_scale() -> None:
    original, scaler = torch.amp.GradScaler.scale, torch.amp.GradScaler("cpu", init_scale=1024.0)
    outer, inner = LossTap(), LossTap()
    try:
        scaler.scale(loss_of(2.0)).backward()
        assert [float(tap.take() or 0.0) for tap in (outer, inner)] == [2.0, 2.0]
        scaler.scale(loss_of(3.0))
        loss_of(4.0).backward()  # another scalar than the scaled one
        assert [float(tap.take() or 0.0) for tap in (outer, inner)] == [4.0, 4.0]
    finally:
        outer.close()
        inner.close()
    assert torch.amp.GradScaler.scale is original
    assert float(scaler.scale(loss_of(2.0)).detach()) == 2048.0


def loss_of(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1.0
