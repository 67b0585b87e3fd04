"""Loops in the idioms of public scripts train as on one process, without a profile."""

from __future__ import annotations

import pytest
import torch
from cases import idioms
from cases.batches import Batch, Call
from cases.idioms import Idiom, agent

import offbeat
from offbeat import BSP, DDP, P3, WFBP, DeAR, DreamDDP, LocalSGD, Strategy

# With a period of 1 and without momentum the mean of weights is that of gradients.
EVERY, DREAM = LocalSGD(period=1), DreamDDP(period=1)
OTHERS: list[Strategy] = [EVERY, DREAM, WFBP(), BSP(), EVERY, DREAM, WFBP(), DeAR()]
ONE, TWO = Batch(1), Batch(2)

# P3 changes weights in the next forward, so it must see every forward; the others see where
# backward begins in several ways.
FORWARDS = [
    *((Idiom(loop, agent), P3()) for loop in idioms.METHODS),
    *((Idiom(idioms.METHODS[i], agent), other) for i, other in enumerate(OTHERS)),
]
TWO_STEPS = (idioms.takes_two_steps, idioms.steps_both, idioms.steps_in_turn)
# Sharpness-aware steps, modes of schedule-free optimizers, several optimizers in one step or in
# turn, weights that are put back through `.data`.
OPTIMIZERS = [
    *((idiom, WFBP()) for idiom in idioms.OPTIMIZERS),
    *((idiom, P3()) for idiom in idioms.OPTIMIZERS if idiom.loop in TWO_STEPS),
]


@TWO.each(idioms.differences, [FORWARDS], [OPTIMIZERS])
def test_trained_as_on_one_process(calls: list[Call]) -> None:
    for call in calls:
        for found in call.results:
            assert {key: off for key, off in found.items() if not is_small(off)} == {}


def is_small(off: float | str) -> bool:
    return isinstance(off, float) and off <= 1e-12


# ---- forward passes that are no call of the model -------------------------------------------

DDP_LOOPS = (idioms.updates_by_method, idioms.calls_submodules)


@TWO.given(idioms.differences, [(Idiom(loop, agent), DDP()) for loop in DDP_LOOPS])
def test_ddp_averages_what_methods_compute_and_refuses_parts(call: Call) -> None:
    for found in call.results:
        averaged, refused = found.values()
        assert is_small(averaged)
        assert str(refused).startswith("RuntimeError: optimizer.step() without a forward")


HOWS = ("method", "eval", "parts", "by hand")


@ONE.each(idioms.profile_of_a_sleeper, *((how,) for how in HOWS))
def test_such_forwards_are_measured(calls: list[Call]) -> None:
    """Without what the script does before them, such as loading data or a roll-out."""
    for call in calls:
        [profile] = call.results
        # Sleeps last longer on a busy machine, never shorter.
        assert sum(b.forward_s for b in profile.buckets) >= 0.9 * idioms.FORWARD_S
        assert sum(b.backward_s for b in profile.buckets) >= 0.9 * idioms.BACKWARD_S
        assert profile.other_s >= 0.9 * (idioms.OTHER_S + idioms.FORWARD_S)
        names = [name for b in profile.buckets for name in b.tensors]
        assert names.index("last.weight") < names.index("first.weight")


@ONE.given(idioms.iterations_begun)
def test_a_method_that_trains_begins_an_iteration_before_its_forward(call: Call) -> None:
    """From its second call on; other methods never do."""
    assert call.results == [[False, False, False, True, False, True]]


# ---- optimizers -----------------------------------------------------------------------------


@TWO.given(idioms.iterations_of_both, LocalSGD(period=2))
def test_averages_after_steps_of_several_optimizers(call: Call) -> None:
    """Every step of both optimizers is one iteration, whose weights are averaged."""
    assert call.results == [(idioms.STEPS, idioms.STEPS // 2 - 1)] * 2


@TWO.given(idioms.overflow_of_one_optimizer)
def test_a_scaler_skips_one_of_several_optimizers(call: Call) -> None:
    """As with torch alone: the other one steps, and the scale is halved."""
    assert call.results == [(True, False, 512.0)] * 2


def test_what_several_optimizers_cannot_do() -> None:
    first, second = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters()) for _ in range(2))
    model = torch.nn.Linear(2, 2)
    mine = torch.optim.SGD(model.parameters())
    for optimizers, words in (
        ([], "a list of 0"),
        ([mine, torch.optim.SGD([model.bias])], "both have parameter 'bias'"),
        ([first, second], "must belong to the model"),
        ([mine, object()], "must be a torch.optim.Optimizer"),
    ):
        with pytest.raises(ValueError, match=words):
            offbeat.prepare(model, optimizers)
    with pytest.raises(ValueError, match="under a2cid2"):
        offbeat.prepare(model, [mine], "a2cid2")


@ONE.given(idioms.attributes)
def test_the_prepared_optimizer_is_the_users(call: Call) -> None:
    """Its attributes, methods and class."""
    expected = {"isinstance": True, "rho": 0.5, "set": 0.25, "name": "SAM", "state": True}
    assert call.results == [expected]


@ONE.each(idioms.hooked_parameters, ["local-sgd:period=100"], ["wfbp"])
def test_parameters_keep_no_hooks_of_the_measurement(calls: list[Call]) -> None:
    """torch calls the empty hooks of a parameter in every backward."""
    [[periodic], [every]] = [call.results for call in calls]
    assert (periodic["observed"], periodic["planned"]) == (0, 0)
    assert every["observed"] == 0
    assert 0 < every["planned"] <= every["all"]


@TWO.given(idioms.model_protocol)
def test_the_prepared_model_is_indexed_and_accumulates_as_under_ddp(call: Call) -> None:
    facts = {"layer": True, "names": True, "local": True, "averaged": True}
    assert call.results == [{"len": 3, "refused": 6} | facts] * 2
