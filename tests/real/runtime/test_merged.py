"""Gradients added up over windows: applied late, once, and only when complete, whatever the user's
loop does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from cases import merging as support
from cases import schedules, workers
from cases.batches import Batch, Call
from cases.comparing import assert_same
from cases.merging import Merging, closes_every
from cases.models import Case, Loop, build_model
from cases.schedules import CASE, Script
from oracle.training import Replica, apply_merged, merged, replicas
from torch.optim.lr_scheduler import LRScheduler, StepLR

from offbeat import WFBP, DeFT, Strategy
from offbeat.plan import Plan
from offbeat.strategies.schedulers import SchedulerGate

PAIRS = Merging(period=2)
MEANS = Merging(period=3, merge="mean")
ITERATIONS = 11
STEPPED = Case("mlp", "nesterov", "step")
# What a script does with gradients that a window adds up, and layers that do not run.
SCRIPTS: list[tuple[Merging, Script]] = [
    (PAIRS, Script(STEPPED, Loop(micro=3, clear="none"))),  # several backward passes
    (PAIRS, Script(STEPPED, Loop(clear="in place"))),
    (PAIRS, Script(STEPPED, Loop(clear="after step"))),
    (PAIRS, Script(STEPPED, Loop(clip=0.05, clear="none"))),  # clips what is applied
    (PAIRS, Script(STEPPED, Loop(closure=True))),
    (PAIRS, Script(Case("branches", "adam", "cosine"), Loop(idle=frozenset({(0, 2), (1, 5)})))),
    (PAIRS, Script(Case("late", "adam", "cosine"))),  # without gradients at first
    (PAIRS, Script(Case("reading", "adam", "cosine"))),  # weights read from outside
    (MEANS, Script(STEPPED, Loop(micro=3, clip=0.05, clear="model"))),
    (MEANS, Script(STEPPED, Loop(evaluate=True))),
]
ONE, TWO = Batch(1), Batch(2)
FOLLOWED = [TWO.add(schedules.follow, script, one, ITERATIONS) for one, script in SCRIPTS]


@pytest.mark.parametrize("i", range(len(SCRIPTS)), ids=[f"{one}-{s}" for one, s in SCRIPTS])
def test_equals_the_equations(i: int) -> None:
    """Optimizer, its step count and the scheduler move only when a window is applied; what
    is clipped is what is applied. Micro-batches count as the batch that they are parts of."""
    strategy, script = SCRIPTS[i]
    for (mine, _), replica in zip(FOLLOWED[i].results, reference(script, strategy), strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


def reference(script: Script, strategy: Merging) -> list[Replica]:
    world = replicas(script.case, 2, script.loop)
    merged(world, range(ITERATIONS), closes_every(strategy.period), strategy.merge)
    return world


# Pauses within a window and at its end, twice at once, and before the first one is complete.
PAUSED: tuple[tuple[Strategy, tuple[int, ...], int], ...] = (
    (MEANS, (4,), ITERATIONS),
    (PAIRS, (3, 4), ITERATIONS),
    (DeFT(), (0, 6), ITERATIONS),
)


@TWO.each(support.train_with_pauses, *PAUSED)
def test_consolidate_applies_everything_once_and_begins_anew(calls: list[Call]) -> None:
    for (strategy, pauses, _), call in zip(PAUSED, calls, strict=True):
        ranks, world = call.results, replicas(CASE, 2)
        closes, merge = closes_of(ranks[0].plan)
        bounds = [0, *(t + 1 for t in pauses), ITERATIONS]
        for start, stop in pairwise(bounds):
            if start:
                apply_merged(world, merge)
            merged(world, range(start, stop), closes, merge)
        for mine, replica in zip(ranks, world, strict=True):
            assert_same(mine, replica, f"{strategy}, rank {replica.rank}")


def closes_of(plan: Plan) -> tuple[Callable[[int], bool], str]:
    """Which iterations close a window, counted in the plan, and what becomes of it."""
    [closing] = [apply.phases for apply in plan.applies if apply.rule == "close"]
    [local] = [apply for apply in plan.applies if apply.rule == "local"]
    return lambda r: plan.phase(r) in closing, local.arg("merge")


@TWO.given(support.consolidate_in_between, PAIRS)
def test_consolidate_within_an_iteration_is_an_error(call: Call) -> None:
    for words in call.results:
        assert len(words) == 1
        assert "backward ran without optimizer.step() after it" in words[0]


@TWO.given(support.load_and_consolidate, PAIRS)
def test_loading_weights_discards_what_was_merged_for_others(call: Call) -> None:
    """Gradients of the weights before are not applied to those that were loaded."""
    assert call.results == [True, True]


@TWO.given(support.train_on_two_links, PAIRS, ITERATIONS)
def test_two_links(call: Call) -> None:
    for (mine, groups), replica in zip(call.results, reference(Script(), PAIRS), strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")
        assert groups == 2


ZEROED = Script(loop=Loop(clear="gradients in place"))


@TWO.given(schedules.follow, ZEROED, PAIRS, ITERATIONS)
def test_gradients_zeroed_in_place(call: Call) -> None:
    """They hold what the window has added up so far: it is applied, or it is an error."""
    for outcome, replica in zip(call.outcomes, reference(ZEROED, PAIRS), strict=True):
        if outcome.error:
            assert outcome.kind == "ValueError"
            assert "gradients" in outcome.error
        else:
            assert_same(outcome.result[0], replica, f"rank {replica.rank}")


@ONE.given(workers.train_with, CASE, PAIRS, range(2), Loop(scale=8.0), {})
def test_gradient_scaler_is_an_error(call: Call) -> None:
    [outcome] = call.outcomes
    assert outcome.kind == "ValueError"
    assert "gradients of several scales cannot be unscaled together" in outcome.error


@ONE.each(support.tensor_bytes, [PAIRS], [WFBP()])
def test_one_extra_copy_of_the_gradients(calls: list[Call]) -> None:
    [(merging, gradients)], [(plain, _)] = (call.results for call in calls)
    trainable = [p for p in build_model(Case("mlp")).parameters() if p.requires_grad]
    assert gradients == sum(p.nbytes for p in trainable)
    assert merging - plain == gradients + 8 * len(trainable)  # who has none, a number each


# ---- schedulers ---------------------------------------------------------------------------------


RATES = {name: ONE.add(support.rates_of, PAIRS, name, 12) for name in support.SCHEDULERS}


@pytest.mark.parametrize("name", RATES)
def test_schedulers(name: str) -> None:
    """Per iteration they move with the optimizer; per epoch they are not held up."""
    [rates] = RATES[name].results
    assert rates == pytest.approx(expected_rates(name, 12))


def expected_rates(name: str, iterations: int) -> list[float]:
    """The same scheduler on a plain optimizer, stepped when it should be."""
    optimizer = plain_optimizer()
    scheduler, every = support.SCHEDULERS[name](optimizer)
    rates = []
    for t in range(iterations):
        applied = t % 2 == 1 and t > 1
        if applied:
            optimizer.step()
        if applied if every == 1 else t % every == every - 1:
            support.step_scheduler(scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_gate_knows_its_own_schedulers() -> None:
    """Another optimizer's go on; a scheduler built before prepare and one built after do not."""
    mine, other = plain_optimizer(), plain_optimizer()
    schedulers = [StepLR(mine, 1, 0.5), StepLR(other, 1, 0.5)]
    gate = SchedulerGate(mine)
    for applied in (False, True, False):
        gate.on_iteration_end(applied)
        for scheduler in schedulers:
            scheduler.step()
    gate.close()
    assert [s.last_epoch for s in schedulers] == [1, 3]


def test_gate_decides_once_per_iteration() -> None:
    """However often a scheduler is stepped in it; one of every third iteration goes on."""
    optimizer = plain_optimizer()
    often, rare = Both(optimizer, 1, 0.5), StepLR(optimizer, 1, 0.5)
    gate = SchedulerGate(optimizer)
    for t in range(6):
        gate.on_iteration_end(t % 2 == 1)
        for _ in range(4):
            often.step()
        if t % 3 == 2:
            rare.step()
    gate.close()
    assert (often.last_epoch, rare.last_epoch) == (12, 2)


class Left(StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


class Right(StepLR):
    pass


class Both(Left, Right):
    """Reached on two ways from LRScheduler."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)], ids=str)
def test_gates_leave_every_class_as_it_was(order: Sequence[int]) -> None:
    classes = [LRScheduler, *every_subclass(LRScheduler)]
    before = {cls: vars(cls).get("step") for cls in classes}
    gates = [SchedulerGate(plain_optimizer()) for _ in order]
    assert LRScheduler.step is not before[LRScheduler]
    for i in order:
        gates[i].close()
    after = {cls: vars(cls).get("step") for cls in classes}
    for cls, step in before.items():  # so that what follows is not disturbed
        if step is not None:
            cls.step = step  # type: ignore[method-assign]
    assert after == before


def every_subclass(cls: type) -> set[type]:
    return {c for child in cls.__subclasses__() for c in (child, *every_subclass(child))}


def plain_optimizer() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    optimizer._opt_called = True  # type: ignore[attr-defined] # else schedulers warn
    return optimizer
