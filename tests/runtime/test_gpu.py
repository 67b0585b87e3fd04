"""The same numbers on a GPU: streams, events and NCCL in place of threads, clocks and gloo."""

from __future__ import annotations

import oddities
import pytest
import torch
from comparing import assert_close
from worlds import run_world

from offbeat import BSP, DDP, WFBP, LocalSGD, PartialSync, Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BEFORE = PartialSync(period=2, average="before_update")


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(),
        WFBP(fusion="none"),
        DDP(),
        LocalSGD(period=2, state="averaged"),
        PartialSync(period=2),
        BEFORE,
    ],
    ids=str,
)
def test_alone_it_is_plain_training(strategy: Strategy) -> None:
    """An average over one rank changes nothing, so every strategy is plain training."""
    [(plain, ours)] = run_world(oddities.train_on_gpu, 1, strategy, False, timeout_s=100)
    assert_close(ours, plain, str(strategy))


@pytest.mark.parametrize("strategy", [WFBP(), BEFORE], ids=str)
def test_gradient_scaler(strategy: Strategy) -> None:
    [(plain, ours)] = run_world(oddities.train_on_gpu, 1, strategy, True, timeout_s=100)
    assert_close(ours, plain, str(strategy))


def test_profile_is_measured_with_events() -> None:
    [profile] = run_world(oddities.observe_on_gpu, 1, timeout_s=100)
    assert profile.forward_s > 0
    assert profile.backward_s > 0
    assert profile.update_s > 0
