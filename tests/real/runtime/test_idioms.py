"""Loops in the idioms of public scripts train as on one process, without a profile."""

from __future__ import annotations

import pytest
import torch
from cases import idioms
from cases.idioms import Idiom, agent
from harness.ranks import run_world

import offbeat
from offbeat import BSP, DDP, P3, WFBP, DeAR, DreamDDP, LocalSGD, Strategy

# With a period of 1 and without momentum the mean of weights is that of gradients.
EVERY, DREAM = LocalSGD(period=1), DreamDDP(period=1)
OTHERS: list[Strategy] = [EVERY, DREAM, WFBP(), BSP(), EVERY, DREAM, WFBP(), DeAR()]


def assert_alike(ranks: list[dict[tuple[str, str], float | str]]) -> None:
    wrong = {key: off for found in ranks for key, off in found.items() if not is_small(off)}
    assert not wrong


def is_small(off: float | str) -> bool:
    return isinstance(off, float) and off <= 1e-12


# ---- forward passes that are no call of the model -------------------------------------------


def test_forwards_beside_the_call_of_the_model() -> None:
    """P3 changes weights in the next forward, so it must see every forward; the others see where
    backward begins in several ways."""
    cases = [(Idiom(loop, agent), P3()) for loop in idioms.METHODS]
    cases += [(Idiom(idioms.METHODS[i], agent), other) for i, other in enumerate(OTHERS)]
    assert_alike(run_world(idioms.differences, 2, cases, timeout_s=120.0))


def test_ddp_averages_what_methods_compute_and_refuses_parts() -> None:
    loops = (idioms.updates_by_method, idioms.calls_submodules)
    cases = [(Idiom(loop, agent), DDP()) for loop in loops]
    for found in run_world(idioms.differences, 2, cases):
        averaged, refused = found.values()
        assert is_small(averaged)
        assert str(refused).startswith("RuntimeError: optimizer.step() without a forward")


@pytest.mark.parametrize("how", ["method", "eval", "parts", "by hand"])
def test_such_forwards_are_measured(how: str) -> None:
    """Without what the script does before them, such as loading data or a roll-out."""
    [profile] = run_world(idioms.profile_of_a_sleeper, 1, how)
    # Sleeps last longer on a busy machine, never shorter.
    assert sum(b.forward_s for b in profile.buckets) >= 0.9 * idioms.FORWARD_S
    assert sum(b.backward_s for b in profile.buckets) >= 0.9 * idioms.BACKWARD_S
    assert profile.other_s >= 0.9 * (idioms.OTHER_S + idioms.FORWARD_S)
    names = [name for b in profile.buckets for name in b.tensors]
    assert names.index("last.weight") < names.index("first.weight")
    if how in ("method", "parts"):  # memory is measured in forwards in training mode
        assert (sum(b.activation_bytes for b in profile.buckets) > 0) == (how == "method")


def test_a_method_that_trains_begins_an_iteration_before_its_forward() -> None:
    """From its second call on; other methods never do."""
    [begun] = run_world(idioms.iterations_begun, 1)
    assert begun == [False, False, False, True, False, True]


# ---- optimizers -----------------------------------------------------------------------------


def test_optimizers_that_step_by_themselves() -> None:
    """Sharpness-aware steps, modes of schedule-free optimizers, several optimizers in one step or
    in turn, weights that are put back through `.data`."""
    cases = [(idiom, WFBP()) for idiom in idioms.OPTIMIZERS]
    steps = (idioms.takes_two_steps, idioms.steps_both, idioms.steps_in_turn)
    cases += [(i, s) for i in idioms.OPTIMIZERS if i.loop in steps for s in (P3(), DDP())]
    assert_alike(run_world(idioms.differences, 2, cases, timeout_s=120.0))


def test_averages_after_steps_of_several_optimizers() -> None:
    """Every step of both optimizers is one iteration, whose weights are averaged."""
    for counts in run_world(idioms.iterations_of_both, 2, LocalSGD(period=2)):
        assert counts == (idioms.STEPS, idioms.STEPS // 2 - 1)


def test_a_scaler_skips_one_of_several_optimizers() -> None:
    """As with torch alone: the other one steps, and the scale is halved."""
    assert run_world(idioms.overflow_of_one_optimizer, 2) == [(True, False, 512.0)] * 2


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


def test_the_prepared_optimizer_is_the_users() -> None:
    """Its attributes, methods and class."""
    [found] = run_world(idioms.attributes, 1)
    assert found == {"isinstance": True, "rho": 0.5, "set": 0.25, "name": "SAM", "state": True}


def test_parameters_keep_no_hooks_of_the_measurement() -> None:
    """torch calls the empty hooks of a parameter in every backward."""
    [found] = run_world(idioms.hooked_parameters, 1, "local-sgd:period=100")
    assert (found["observed"], found["planned"]) == (0, 0)
    [found] = run_world(idioms.hooked_parameters, 1, "wfbp")
    assert (found["observed"], found["planned"]) == (0, found["all"])


def test_the_prepared_model_is_indexed_and_accumulates_as_under_ddp() -> None:
    for found in run_world(idioms.model_protocol, 2):
        facts = {"layer": True, "names": True, "local": True, "averaged": True}
        assert found == {"len": 3, "refused": 6} | facts
