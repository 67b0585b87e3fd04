"""Models that `fully_shard` has divided inside nodes, averaged between nodes.

The equations are those of replicated nodes, with the layout of shards where slices or blocks depend
on it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.comparing import assert_close, assert_same
from cases.models import build_model
from cases.node_jobs import ADAM, CODED, members, profile_in
from cases.sharded_jobs import (
    CASES,
    KILLED,
    PARAMETERS,
    REFUSED,
    RESHAPED,
    SAVED,
    SHAPED,
    SHAPES,
    SHARDED,
    VARIANTS,
    continue_killed,
    diverge,
    nodes_of,
    refuse_all,
    repair,
    reshape,
    reshape_ours,
    spoil,
    train,
    train_all_saved,
    train_until_killed,
    train_variants,
    unite,
)
from cases.workers import TIMEOUT_S
from harness.ranks import call, one_of, run_ranks, watch_ranks
from oracle.training import bsp, local_sgd

Call = tuple[Any, ...]  # what `train` gets
# Three ranks pad shards and slices; three nodes divide an average and a vote.
SIX: tuple[Call, ...] = (("slices", nodes_of(2, 3)), ("selsync", nodes_of(3, 2)))
TWO: tuple[Call, ...] = tuple((name, SHARDED) for name in CASES if name != "slices")


def check(calls: tuple[Call, ...], i: int) -> None:
    name, nodes = calls[i]
    results = one_of(sum(map(len, nodes)), train, calls, i)
    strategy, equations, case, loop = CASES[name]
    world = members(case, nodes, loop)
    equations(world, strategy.plan(profile_in(case, nodes)), nodes)
    for trained, replica in zip(results, world, strict=True):
        assert_same(trained, replica, f"rank {replica.rank}")


@pytest.mark.parametrize("i", range(len(TWO)), ids=[name for name, _ in TWO])
def test_two_nodes_of_two_ranks(i: int) -> None:
    check(TWO, i)


@pytest.mark.parametrize("i", range(len(SIX)), ids=[f"{one[0]}-{len(one[1])}" for one in SIX])
def test_two_nodes_of_three_ranks_and_three_of_two(i: int) -> None:
    check(SIX, i)


# ---- what takes turns in one world ----------------------------------------------------------

SPOILT = {"gradients": ("wfbp", ADAM), "codes": ("wfbp:wire=int8:fusion=none", CODED)}
Results = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results_of(folder: Path) -> Results:
    """A function of a name: what each rank of two nodes of two has found."""
    calls = {
        "options": (train_variants, tuple(VARIANTS)),
        **{f"spoilt {name}": (spoil, *how, SHARDED) for name, how in SPOILT.items()},
        **{f"diverged {how}": (diverge, how) for how in (False, True)},
        "repaired": (repair,),
        "united": (unite, SHARDED),
        "saved": (train_all_saved, str(folder / "saved")),
        "reshaped": (reshape, str(folder / "reshaped")),
        "refused": (refuse_all,),
    }
    return lambda name: one_of(4, call, tuple(calls.values()), [*calls].index(name))


def test_options_of_fsdp(results_of: Results) -> None:
    """The same bits as a loop that averages the shards itself."""
    for found in results_of("options"):
        assert {name: ours == theirs for name, (ours, theirs) in found.items()} == dict.fromkeys(
            VARIANTS, True
        )


@pytest.mark.parametrize("what", SPOILT)
def test_values_that_are_not_finite(results_of: Results, what: str) -> None:
    """One rank of a node has them. The node is named by all ranks."""
    for rank, error in enumerate(results_of(f"spoilt {what}")):
        assert f"rank {2 + rank % 2} sent values that are not finite" in error


@pytest.mark.parametrize("consolidating", [False, True], ids=["in training", "in consolidate"])
def test_shards_that_diverge_are_found(results_of: Results, consolidating: bool) -> None:
    for error in results_of(f"diverged {consolidating}"):
        assert "replicas have diverged" in error
        assert "'6.weight' of rank 3 and of rank 1 differ" in error


def test_shards_are_repaired_with_their_state(results_of: Results) -> None:
    ranks = results_of("repaired")
    assert len({bits for *_, bits in ranks}) == 1
    before, after = ([one[i] for one in ranks] for i in range(2))
    for name, tensor in after[0][0].items():
        mean = (before[0][0][name] + before[2][0][name]) / 2
        torch.testing.assert_close(tensor, mean, rtol=1e-14, atol=1e-14)
    for index, state in after[0][1].items():
        mean = (before[0][1][index]["exp_avg"] + before[2][1][index]["exp_avg"]) / 2
        torch.testing.assert_close(state["exp_avg"], mean, rtol=1e-14, atol=1e-14)


def test_buffers_are_united_over_all_ranks(results_of: Results) -> None:
    """Parameters over replicas, running statistics over ranks, each of which has its own."""
    ranks = results_of("united")
    assert len({bits for *_, bits in ranks}) == 1
    before, after, _ = zip(*ranks, strict=True)
    assert len({one["2.running_mean"].sum().item() for one in before}) == 4
    for name, tensor in after[0].items():
        if tensor.is_floating_point():
            mean = torch.stack([one[name] for one in before]).mean(dim=0)
            torch.testing.assert_close(tensor, mean, rtol=1e-14, atol=1e-14)


def test_checkpoints_continue_bit_by_bit(results_of: Results) -> None:
    for found in results_of("saved"):
        alike = {name: whole == resumed for name, (whole, resumed) in found.items()}
        assert alike == dict.fromkeys(SAVED, True)


def test_torch_reads_checkpoints(results_of: Results, folder: Path) -> None:
    """Into another shape of nodes, and into a model of a single process."""
    ranks = results_of("reshaped")
    for found in ranks:
        assert_close(found["after"], ranks[0]["before"], "model", 0.0)
        assert_close(found["trained"], ranks[0]["trained"], "model", 0.0)
        assert any((found["trained"][n] != t).any() for n, t in found["after"].items())
    alone = {"model": build_model(SHAPED, seed=9).state_dict()}
    with warnings.catch_warnings():  # torch states that there is a single process
        warnings.simplefilter("ignore")
        dcp.load(alone, checkpoint_id=str(folder / "reshaped"), no_dist=True)
    assert_close(alone["model"], ranks[0]["before"], "model", 0.0)


@pytest.fixture(scope="module")
def reshaped(folder: Path) -> list[Any]:
    return run_ranks(4, reshape_ours, str(folder / "ours"))


@pytest.mark.parametrize("key", RESHAPED, ids=" - ".join)
def test_checkpoints_continue_in_other_nodes(reshaped: list[Any], key: tuple[str, ...]) -> None:
    """From the same weights and optimizer state, with a plan that begins anew."""
    strategy, saved, loaded = key
    nodes, expected = SHAPES[loaded], reshaped[0][strategy, saved]
    world = members(SHAPED, nodes)
    for replica in world:
        replica.model.load_state_dict(expected[0])
        replica.optimizer.load_state_dict(copy.deepcopy(expected[1]))
    if strategy == PARAMETERS:
        local_sgd(world, range(3, 5), period=2)
    else:
        bsp(world, range(3, 5))
    for found, replica in zip(reshaped, world, strict=True):
        error, exact, iteration, state, trained = found[key]
        assert (exact, iteration) == (False, 3)
        assert_close(state, expected, "loaded", 0.0)
        assert_close(trained, replica.model.state_dict(), f"rank {replica.rank}", 1e-12)
        if strategy == PARAMETERS:
            assert "whose ranks have states of their own" in error
            assert "call model.consolidate() before offbeat.save" in error


def test_checkpoints_of_other_nodes_name_both(reshaped: list[Any]) -> None:
    [error] = {found[PARAMETERS, "replicated", "replicated crosswise"][0] for found in reshaped}
    assert (
        "is of 4 ranks (2 nodes of 2 ranks that replicate the model) under local-sgd(period=2), "
        "whose ranks have states of their own, and here are 4 ranks (2 nodes of 2 ranks "
        "(0, 2; 1, 3) that replicate the model) under local-sgd(period=2); start the job alike"
    ) in error


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_on_every_rank(results_of: Results, name: str) -> None:
    for found in results_of("refused"):
        assert REFUSED[name][1] in found.get(name, "nothing"), found.get(name)


def require_named(strategy: str, nodes: Any, who: int, path: str) -> None:
    outcomes = watch_ranks(4, train_until_killed, strategy, nodes, who, path, doomed=[who])
    for outcome in outcomes:
        if outcome.rank != who:
            assert f"Rank {who} (" in outcome.error, outcome
            assert f", node {who // 2}) " in outcome.error, outcome
            assert outcome.seconds < TIMEOUT_S + 20, outcome


def test_killed_jobs_continue_with_the_same_bits(tmp_path: Path) -> None:
    paths = [str(tmp_path / strategy) for strategy, _, _ in KILLED]
    for job, path in zip(KILLED, paths, strict=True):
        require_named(*job, path)
    for found in run_ranks(4, continue_killed, paths):
        assert [whole == resumed for whole, resumed in found] == [True] * len(KILLED)
