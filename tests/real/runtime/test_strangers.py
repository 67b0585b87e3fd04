"""Scripts that nobody had in mind train as on one process that has all data, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import strangers
from cases.batches import Batch, Call
from harness.ranks import run_ranks
from torch import nn

import offbeat
from offbeat import (
    DDP,
    P3,
    WFBP,
    A2CiD2,
    Cyclic,
    DeFT,
    DiLoCo,
    DreamDDP,
    LocalSGD,
    Strategy,
)

EVERY = LocalSGD(period=1)  # without momentum the mean of weights is that of gradients

ALIKE: list[tuple[strangers.Script, Strategy]] = [
    (strangers.sets_gradients, WFBP()),
    (strangers.sets_gradients, P3()),
    (strangers.sets_gradients, EVERY),
    (strangers.leaves_batches_out, WFBP()),
    (strangers.leaves_batches_out, EVERY),
    (strangers.trains_noisy_weights, WFBP()),
    (strangers.trains_noisy_weights, EVERY),
    (strangers.steps_twice, P3()),
    (strangers.begins_a_layer_anew, WFBP()),
    (strangers.begins_a_layer_anew, P3()),
    (strangers.compiles_everything, P3()),
    (strangers.survives_an_error, EVERY),
    (strangers.steps_another_optimizer, WFBP()),
    (strangers.steps_the_given_optimizer, WFBP()),
    (strangers.steps_by_two_optimizers, WFBP()),
]
WITH_MOMENTUM: list[tuple[strangers.Script, Strategy]] = [
    (strangers.forgets_momentum, WFBP()),
    (strangers.forgets_momentum, P3()),
]
REFUSED: list[tuple[strangers.Script, Strategy, str]] = [
    (strangers.survives_an_error, WFBP(), "exception that was caught"),
    *((strangers.steps_after_an_error, s, "only some parameters") for s in (WFBP(), P3(), EVERY)),
    (strangers.steps_after_a_first_error, WFBP(), "only some parameters"),
    (strangers.steps_another_optimizer, EVERY, "SGD steps parameters that another"),
    (strangers.steps_the_given_optimizer, EVERY, "the one that offbeat.prepare returned"),
    (strangers.wraps_in_ddp, WFBP(), "is around a prepared model"),
]
TWO = Batch(strangers.RANKS)


@TWO.each(strangers.outcomes, [ALIKE, 0.0], [WITH_MOMENTUM, 0.9])
def test_trained_as_on_one_process(calls: list[Call]) -> None:
    plain, with_momentum = [call.results for call in calls]
    for cases, momentum, ranks in ((ALIKE, 0.0, plain), (WITH_MOMENTUM, 0.9, with_momentum)):
        for (script, strategy), *found in zip(cases, *ranks, strict=True):
            what = f"{script.__name__} under {strategy}"
            expected = strangers.trained(script, momentum)
            for weights in found:
                assert not isinstance(weights, str), (what, weights)
                for mine, theirs in zip(weights, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=what)


@TWO.given(strangers.outcomes, [case[:2] for case in REFUSED], 0.0)
def test_refused_in_words(call: Call) -> None:
    for found in call.results:
        for (script, strategy, words), said in zip(REFUSED, found, strict=True):
            assert isinstance(said, str), (script.__name__, str(strategy))
            assert words in said


def test_begun_anew_after_a_failure() -> None:
    """Whoever learns of it last does not keep the others waiting until their time is over."""
    ranks = run_ranks(3, strangers.begins_anew, Cyclic(stagger="least"), timeout_s=60.0)
    assert sum("not finite" in said for said, _ in ranks) >= 1
    assert all(said for said, _ in ranks)
    for _, weights in ranks[1:]:
        assert all(map(torch.equal, weights, ranks[0][1]))


ONE_SIDED = (DeFT(), DiLoCo(period=2, fragments=1))


@TWO.given(strangers.outcomes, [(strangers.loads_on_one_rank, s) for s in ONE_SIDED], 0.0, 3.0)
def test_loading_on_one_rank_alone(call: Call) -> None:
    """Neither an abort of the process, as of different messages, nor replicas that stay apart."""
    first, second = call.results
    assert all("load them on all ranks" in said for said in first)
    assert all("Error" in said for said in second)


def test_saving_on_one_rank_alone(tmp_path: Path) -> None:
    said, _ = run_ranks(2, strangers.saves_alone, str(tmp_path))
    assert "Every rank must call it" in said
    assert "rank 1" in said


# Of each job: strategy, iterations, whether replicas are consolidated after the last one or before
# it, and whether they differ at the end.
ENDS: list[tuple[Strategy, int, bool, bool]] = [
    (LocalSGD(period=2), 3, False, True),
    (LocalSGD(period=2), 3, True, False),
    (LocalSGD(period=2), 4, False, False),
    (DreamDDP(period=2), 3, False, True),
    (P3(), 3, False, False),
    (DDP(), 3, False, False),
    (A2CiD2(), 3, False, True),
    (A2CiD2(), 3, True, False),
]


@TWO.given(strangers.ends, [case[:3] for case in ENDS])
def test_differences_of_replicas_at_the_end_are_printed_once(call: Call) -> None:
    first, second = call.results
    for (*case, differ), text, other in zip(ENDS, first, second, strict=True):
        count = text.count("replicas differ, because no average followed their last updates")
        assert count == text.count("call model.consolidate() on all ranks") == differ, case
        assert "replicas differ" not in other


@pytest.mark.parametrize("name", ["DistributedDataParallel", "DeepSpeedEngine"])
def test_a_wrapped_model_is_refused(name: str) -> None:
    """Wrappers are known by the names of their classes."""
    wrapper = type(f"Own{name}", (type(name, (nn.Sequential,), {}),), {})
    model = nn.Sequential(wrapper(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=f"must not be wrapped in {name}"):
        offbeat.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
