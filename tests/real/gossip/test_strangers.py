"""Scripts that nobody wrote with gossip in mind: what each has without gossip, or what must be so
of all together."""

from __future__ import annotations

import torch
from cases.gossip_strangers import (
    HOW,
    LOOPS,
    adversaries,
    changes_weights,
    fails_early,
    of_half_precision,
    run,
)
from harness.ranks import run_ranks
from torch import Tensor

from offbeat import ADPSGD, A2CiD2

NAMES = [loop.__name__ for loop in LOOPS]
NEVER = 1e-9  # exchanges per gradient


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values]).mean(0)


def test_without_an_exchange_a_script_does_what_it_does_alone() -> None:
    ranks = run_ranks(2, run, A2CiD2(rate=NEVER), NAMES)
    for name in NAMES:
        for found in ranks:
            assert found.exchanges[name] == 0
            torch.testing.assert_close(found.before[name], found.alone[name], msg=name)
            alone = mean([one.alone[name] for one in ranks])
            torch.testing.assert_close(found.after[name], alone, msg=name)


def test_with_exchanges_the_mean_is_that_of_all_updates() -> None:
    names = [name for name in NAMES if name != "loads_what_it_saved"]  # that is no update
    ranks = run_ranks(2, run, A2CiD2(rate=3.0), names, 2)
    for name in names:
        for found in ranks:
            assert found.exchanges[name] >= 2
            expected = found.start[name] + mean([one.moved[name] for one in ranks])
            torch.testing.assert_close(found.after[name], expected, msg=name)
        assert torch.equal(ranks[0].after[name], ranks[1].after[name])
        assert not torch.equal(ranks[0].moved[name], ranks[1].moved[name])


def test_two_models_of_one_script_gossip_apart() -> None:
    ranks = run_ranks(2, adversaries, A2CiD2(rate=3.0))
    start = ranks[0][0]
    for _, _, after in ranks:
        torch.testing.assert_close(after, start + mean([total for _, total, _ in ranks]))


def test_weights_that_the_script_changes_itself() -> None:
    for said in run_ranks(2, changes_weights, A2CiD2(rate=NEVER)):
        for how, words in zip(HOW, said, strict=True):
            assert ("was changed outside of optimizer.step()" in words) == (how != "hook"), words


def test_a_rank_that_ends_by_an_exception_stops_nobody() -> None:
    found = run_ranks(3, fails_early, ADPSGD("complete", rate=3.0))
    assert found[1].numel() == 0
    assert torch.equal(found[0], found[2])


def test_a_model_of_bf16_ends_alike_near_the_mean() -> None:
    ranks = run_ranks(2, of_half_precision, A2CiD2(rate=3.0))
    assert torch.equal(ranks[0][2], ranks[1][2])
    expected = ranks[0][0] + mean([total for _, total, _ in ranks])
    off = (ranks[0][2].double() - expected).norm() / expected.norm()
    assert off < 0.02  # a rounding is 2^-9
