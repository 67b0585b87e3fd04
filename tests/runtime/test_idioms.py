"""Loops in the idioms of public scripts train as on one process, without a profile."""

from __future__ import annotations

import idioms
import pytest
from idioms import Idiom, agent
from worlds import run_world

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
    assert sum(b.forward_s for b in profile.buckets) == pytest.approx(idioms.FORWARD_S, abs=0.01)
    assert sum(b.backward_s for b in profile.buckets) == pytest.approx(idioms.BACKWARD_S, abs=0.01)
    assert profile.other_s == pytest.approx(idioms.OTHER_S + idioms.FORWARD_S, abs=0.015)
    names = [name for b in profile.buckets for name in b.tensors]
    assert names.index("last.weight") < names.index("first.weight")
    if how in ("method", "parts"):  # memory is measured in forwards in training mode
        assert (sum(b.activation_bytes for b in profile.buckets) > 0) == (how == "method")


def test_a_method_that_trains_begins_an_iteration_before_its_forward() -> None:
    """From its second call on; other methods never do."""
    [begun] = run_world(idioms.iterations_begun, 1)
    assert begun == [False, False, False, True, False, True]
