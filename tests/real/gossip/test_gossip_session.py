"""Training with gossip through the unchanged loop, in processes of their own."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations
from pathlib import Path

import networkx as nx
import pytest
import torch
from cases.gossip_workers import (
    Gossiped,
    around,
    consolidated,
    exchanged_before,
    gossip,
    gradient_seconds,
    in_evaluation_mode,
    loaded,
    pairs_with_a_slow_one,
    recorded,
    refused,
)
from cases.models import Case, build_model
from harness.parts import partners
from harness.ranks import run_ranks, watch_ranks
from oracle.training import bsp, replicas

from offbeat import ADPSGD, A2CiD2

TRIP_S = 0.5  # a round trip on a busy machine takes less


def assert_same(found: list[Gossiped]) -> None:
    for one in found[1:]:
        for name, value in found[0].model.items():
            assert torch.equal(one.model[name], value), name


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (Case("conv", "nesterov", "step"), A2CiD2(rate=4.0)),
        (Case("mlp", "adam", "none", torch.float32), ADPSGD("complete", rate=4.0, wire="bf16")),
        (Case("conv", "nesterov", "step"), A2CiD2(rate=4.0, wire="int8")),
        (Case("mlp", "adam", "none", torch.float32), ADPSGD("complete", rate=4.0, wire="int4")),
    ],
    ids=str,
)
def test_workers_exchange_and_end_alike(case: Case, strategy: A2CiD2 | ADPSGD) -> None:
    found = run_ranks(3, gossip, case, strategy, 8, None, 3)
    assert_same(found)
    # All workers agree on the same units in the same order; some may not know the newest ones yet.
    most = max((one.units for one in found), key=len)
    for one in found:
        assert one.units
        assert one.units == most[: len(one.units)]
        assert one.exchanges >= 3
        assert all(one.seen)
        assert one.said == []
    # What consolidate leaves is near the mean of what the workers had, statistics too.
    for name, value in found[0].model.items():
        if value.is_floating_point():
            had = torch.stack([one.before[name].double() for one in found])
            off = (value.double() - had.mean(0)).abs().max()  # gossip went on meanwhile
            assert off <= 3 * had.std(0).max() + 1e-6, name


def test_workers_exchange_whatever_the_loop_looks_at() -> None:
    assert min(run_ranks(2, in_evaluation_mode, ADPSGD("complete"), timeout_s=30)) >= 2


def test_alone_it_is_the_users_own_training() -> None:
    case = Case("mlp", "nesterov", "step")
    (found,) = run_ranks(1, gossip, case, A2CiD2(), 5)
    world = replicas(case, 1)
    bsp(world, range(5))
    for name, value in world[0].model.state_dict().items():
        torch.testing.assert_close(found.model[name], value)


def test_exchanges_are_recorded_at_both_ends(tmp_path: Path) -> None:
    strategy = A2CiD2("0-1,1-2", rate=4.0)
    records = run_ranks(3, recorded, str(tmp_path), Case("mlp", "sgd"), strategy, 8, 3)
    notes = [record["trace"]["notes"]["gossip"] for record in records]
    assert set(notes[0]["exchanges"]) <= {"1"}
    model = build_model(Case("mlp", "sgd"))
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for record, own in zip(records, notes, strict=True):
        peers = Counter(str(peer) for peer, *_ in own["last"])
        assert peers == own["exchanges"]
        for peer, number, begin_s, end_s, size_bytes in own["last"]:
            assert 0 < begin_s < end_s
            assert size_bytes == size
            theirs = {(p, n): rest for p, n, *rest in notes[peer]["last"]}
            since_s, until_s, _ = theirs[record["rank"], number]
            # Both see it at the same time, on clocks compared to half of a round trip.
            ahead_s = own["origin_s"] - notes[peer]["origin_s"]
            assert begin_s + ahead_s < until_s + TRIP_S
            assert since_s < end_s + ahead_s + TRIP_S
        sample = record["sample"]
        assert sample["iterations"] == list(range(len(sample["iterations"])))
        assert len(sample["iterations"]) == len(record["trace"]["ends_s"][0])


def test_a_graph_by_measured_links() -> None:
    """Between hosts that are alike it is that of all pairs, and everybody has the same."""
    found = run_ranks(4, around, A2CiD2("measured"))
    assert all(edges == found[0] for edges in found)
    assert nx.is_connected(nx.Graph(found[0]))
    assert {end for edge in found[0] for end in edge} == {0, 1, 2, 3}


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_each_pair_is_measured_once(size: int) -> None:
    met = []
    for others in zip(*(partners(rank, size) for rank in range(size)), strict=True):
        for rank, other in enumerate(others):
            if other is not None:
                assert others[other] == rank
                met.append((rank, other))
    assert sorted(met) == sorted(permutations(range(size), 2))


def test_a_thin_link_is_found() -> None:
    """Ranks 0 and 3 reach each other at a tenth of the rate of the others."""
    rates, delays = run_ranks(4, pairs_with_a_slow_one)[1]
    for i, j in combinations(range(4), 2):
        assert 0 < delays[i][j] < 1
        assert (rates[i][j] < 4e6) == ((i, j) == (0, 3))


@pytest.mark.parametrize("wire", ["none", "int4"])
def test_survivors_go_on_and_end_alike(wire: str) -> None:
    strategy = A2CiD2("complete", rate=4.0, silent_s=0.5, wire=wire)
    outcomes = watch_ranks(
        4, gossip, Case("mlp", "sgd"), strategy, 8, 2, 2, doomed=[2], timeout_s=40
    )
    assert outcomes[2].kind == "silent"
    living = [outcomes[rank] for rank in (0, 1, 3)]
    assert [o.error for o in living] == ["", "", ""]
    assert_same([o.result for o in living])
    assert any("worker 2 could not be reached" in word for word in living[0].result.said)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "words"),
    [
        (A2CiD2("torus"), "sgd", "workers (2) of a torus must be"),
        (A2CiD2("0-1,1-2"), "sgd", "worker (2) of the topology must be one of 0..1"),
        (ADPSGD(), "coupled", "clip by the norm"),
    ],
    ids=str,
)
def test_jobs_that_cannot_be(strategy: A2CiD2, optimizer: str, words: str) -> None:
    for said in run_ranks(2, refused, strategy, optimizer):
        assert words in said


def test_a_loaded_checkpoint_is_x_and_the_second_copy_too() -> None:
    for x, tilde, saved, x_after, tilde_after in run_ranks(2, loaded):
        assert not torch.equal(x, tilde)
        assert not torch.equal(x, saved)
        assert torch.equal(x_after, saved)
        assert torch.equal(tilde_after, saved)


def test_a_consolidation_takes_as_many_meetings_as_others_may_ask_for() -> None:
    """So whoever was out of reach finds all its results. Counts are rounded to the nearest one."""
    assert run_ranks(2, consolidated) == [(4, 10)] * 2


def test_what_comes_between_two_iterations_is_no_gradient() -> None:
    assert run_ranks(1, gradient_seconds) == [[1.5, 1.5, 1.0, 1.5]]


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_sees_what_was_exchanged_before(training: bool) -> None:
    assert run_ranks(1, exchanged_before, training) == [True]
