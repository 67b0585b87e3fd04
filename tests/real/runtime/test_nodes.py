"""Replicas of several ranks: gradients averaged inside, a strategy between replicas.

The reference trains every rank by itself. Gradients are averaged over the ranks of a replica, and
parameters over all ranks, so replicas count by their ranks.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import failing, workers
from cases.comparing import assert_same
from cases.models import (
    USUAL,
    Case,
    Loop,
    batch,
    build_model,
    build_optimizer,
    loss_of,
    profile_of,
)
from cases.node_jobs import (
    ADAM,
    CODED,
    CODES,
    NORMED,
    PAIRS,
    STRATEGIES,
    TIED,
    UNEVEN,
    T,
    members,
    profile_in,
)
from cases.workers import Trained
from harness.ranks import call, one_of, watch_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offbeat
from offbeat import ADPSGD, WFBP, Cyclic, FedAvg, LocalSGD, PartialSync, SelSync, Strategy
from offbeat.profile import Profile


def train(
    case: Case, name: str, nodes: Sequence[Sequence[int]], loop: Loop = USUAL
) -> tuple[Trained, Any, str]:
    strategy, _ = EQUATIONS[name]
    profile = profile_in(case, nodes)
    trained = workers.train(
        case, strategy, T, loop=loop, profile=profile, nodes=nodes, compare_every=2
    )
    model = {n: t for n, t in trained.model.items() if "running" not in n and "num_" not in n}
    return trained, trained.plan, workers.bits_of(model.values(), "".join(model))


Call = tuple[Any, ...]  # what `train` gets
EQUATIONS = STRATEGIES | CODES
CLIPPED = Loop(clip=0.05)
THREE = ((0, 1), (2,), (3,))
# One of each kind of average, where replicas count by their ranks.
ODD: tuple[Call, ...] = (
    (NORMED, "wfbp", UNEVEN),  # gradients, and the running statistics of rank 0
    (ADAM, "halves", UNEVEN),  # a reduce-scatter and an all-gather
    (ADAM, "deft", UNEVEN, CLIPPED),  # merged gradients, clipped when they are applied
    (ADAM, "dreamddp clipped", UNEVEN),  # slices of parameters, and norms of a node's gradients
    (ADAM, "dreamddp delayed", UNEVEN),  # averages that are due in a later iteration
    (TIED, "partial", UNEVEN),  # parameters, one of two modules, and state of the optimizer
    (NORMED, "diloco", UNEVEN),  # an outer step, and the running statistics of all ranks
    (ADAM, "selsync", UNEVEN),  # an average after a vote
    (CODED, "int4 of layers", UNEVEN),  # codes of parameters, of shards of unequal nodes
)
# What equal nodes, or more of them, send or compute otherwise.
EVEN: tuple[Call, ...] = (
    (CODED, "int8 of gradients", PAIRS),  # codes of gradients
    (ADAM, "fedavg drawn", PAIRS),  # weights, which unequal nodes refuse
    (ADAM, "dreamddp", PAIRS, Loop(clip=0.05, micro=2, sync=True)),  # several backward passes
    (ADAM, "wfbp", THREE),  # a third replica, and replicas of a single rank
)


def check(of: Call, ranks: list[Any]) -> None:
    case, name, nodes, *loop = of
    world = members(case, nodes, *loop)
    EQUATIONS[name][1](world, ranks[0][1], nodes)
    for (trained, _, _), replica in zip(ranks, world, strict=True):
        assert_same(trained, replica, f"rank {replica.rank}")
    for node in nodes:
        assert len({ranks[rank][2] for rank in node}) == 1, f"bits of {node} differ"


def names_of(calls: tuple[Call, ...]) -> list[str]:
    return [
        f"{name}-{case}-{len(nodes)}{' clipped' if loop else ''}"
        for case, name, nodes, *loop in calls
    ]


@pytest.mark.parametrize("i", range(len(EVEN)), ids=names_of(EVEN))
def test_nodes_of_four_ranks(i: int) -> None:
    check(EVEN[i], found_by(("even", i)))


@pytest.mark.parametrize("i", range(len(ODD)), ids=names_of(ODD))
def test_nodes_of_two_and_three_ranks(i: int) -> None:
    check(ODD[i], one_of(5, train, ODD, i))


# ---- what is refused, on every rank ---------------------------------------------------------


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a strategy without a plan": (
        lambda: {"strategy": ADPSGD()},
        "strategy (ad-psgd) must be one with a plan where replicas have several ranks (nodes (2): "
        "2 nodes of 2 ranks)",
    ),
    "sends between single ranks": (
        lambda: {"strategy": Cyclic()},
        "strategy (cyclic) must average over all replicas where these have several ranks",
    ),
    "a vote on averaged gradients": (
        lambda: {"strategy": SelSync(aggregate="gradients")},
        "aggregate ('gradients') must be 'parameters' where replicas have several ranks",
    ),
    "weights of replicas that count by their ranks": (
        lambda: {
            "strategy": FedAvg(local_steps=2, samples=(3, 1)),
            "nodes": [[0], [1, 2, 3]],
            "profile": profile_in(ADAM, [[0], [1, 2, 3]]),
        },
        "strategy (fedavg(local_steps=2, samples=(3.0, 1.0))) must treat all replicas alike where "
        "they have 1, 3 ranks",
    ),
    "a profile of single ranks": (
        lambda: {"profile": profile_of(ADAM, 2)},
        "the profile does not match: the numbers of ranks of its replicas (()) must be (2, 2)",
    ),
    "a profile of other nodes": (
        lambda: {"profile": profile_in(ADAM, [[0], [1, 2, 3]])},
        "the numbers of ranks of its replicas ((1, 3)) must be (2, 2)",
    ),
    "a profile of nodes for single ranks": (
        lambda: {"nodes": None, "profile": profile_in(ADAM, [[0], [1], [2], [3]])},
        "the numbers of ranks of its replicas ((1, 1, 1, 1)) must be ()",
    ),
    "ranks that are left out": (
        lambda: {"nodes": [[0, 1], [2]]},
        "must hold each of the ranks 0..3 in one node, not 0, 1; 2",
    ),
    "different nodes": (
        lambda: {"nodes": 2 if workers.rank() else [[0, 2], [1, 3]]},
        "the nodes must be the same on all ranks: rank 0 states nodes ([[0, 2], [1, 3]]): 0, 2; "
        "1, 3, rank 1 nodes (2): 0, 1; 2, 3",
    ),
    "nodes on some ranks": (
        lambda: {"nodes": 2 if workers.rank() else None},
        "rank 0 states no nodes, rank 1 nodes (2)",
    ),
    "an unknown size by the launcher": (
        lambda: {"nodes": "auto"},
        "nodes ('auto') needs LOCAL_RANK",
    ),
    "one dimension of whole models": (
        lambda: {"nodes": None, "mesh": mesh()["between"]},
        "must have two dimensions where every rank holds the whole model",
    ),
    "a mesh and nodes": (
        lambda: {"mesh": mesh()},
        "nodes (2) must be left out where mesh is given",
    ),
    "a mesh of another kind": (
        lambda: {"nodes": None, "mesh": [[0, 1], [2, 3]]},
        "mesh (list) must be a torch.distributed.device_mesh.DeviceMesh",
    ),
    "only the link inside": (
        lambda: {"links": ["inside=gloo:lo"]},
        "links must hold one between nodes beside 'inside'",
    ),
}


def refuse_all() -> dict[str, str]:
    """The error of each case on this rank."""
    os.environ["LOCAL_WORLD_SIZE"] = ""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = {}
    for name, (options, _) in REFUSED.items():
        model = build_model(ADAM)
        given = {"strategy": LocalSGD(), "nodes": 2, "profile": profile_in(ADAM, PAIRS)} | options()
        try:
            offbeat.prepare(model, build_optimizer(ADAM, model), timeout_s=20.0, **given)
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_on_every_rank(name: str) -> None:
    for found in found_by("refused"):
        assert REFUSED[name][1] in found.get(name, "nothing"), found.get(name)


# ---- a job that measures its profile --------------------------------------------------------


def measure(nodes: Any) -> dict[str, Any]:
    """Train by a measured profile and say what was printed, planned, counted and found."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(workers.rank() % 2)}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    given = {"mesh": mesh()} if nodes == "mesh" else {"nodes": nodes}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trained = workers.train(
            NORMED, PartialSync(period=2), range(6), unites=True, observe=2, compare_every=1,
            min_bucket_bytes=64, **given,
        )  # fmt: skip
    return {"said": " ".join(said.getvalue().split()), "trained": trained}


@pytest.mark.parametrize("nodes", ["auto", "mesh"])
def test_a_job_measures_both_levels(nodes: str) -> None:
    ranks = found_by(("measured", nodes))
    said = ranks[0]["said"]
    source = {"auto": "LOCAL_WORLD_SIZE", "mesh": "mesh (2 x 2 ranks)"}[nodes]
    assert f"2 nodes of 2 ranks ({source}): every rank holds the whole model" in said
    assert "so partial-sync(period=2, average=before_update) runs instead of" in said
    assert "as if it were a node of its own" not in said
    profile, plan = ranks[0]["trained"].profile, ranks[0]["trained"].plan
    assert (profile.world_size, profile.topology, profile.sharded) == (2, (2, 2), False)
    assert [link.name for link in profile.all_links] == ["net", "inside"]
    assert profile.inside.bytes_per_s > 0
    assert plan.groups == {"inside": ((0,), (1,))}
    assert len({rank["trained"].plan.digest for rank in ranks}) == 1
    assert len({rank["trained"].united for rank in ranks}) == 1
    assert [rank["trained"].place for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Profile.from_dict(profile.to_dict()) == profile


# ---- failures inside a node -----------------------------------------------------------------

FULL = profile_in(ADAM, PAIRS)  # no processor is idle, so the gradients are one message
assert FULL.inside is not None
FULL = replace(
    FULL,
    inside=replace(
        FULL.inside,
        cpu_s_per_message=FULL.inside.latency_s,
        cpu_s_per_byte=1 / FULL.inside.bytes_per_s,
    ),
)
DOWN = re.compile(r"[Rr]ank (\d+)(?: \([^)]*\))? (?:has died or stands still|has left|failed)")


def fail_inside(how: str) -> str:
    strategy = LocalSGD(period=100)
    return failing.train_until(strategy, how, 1, 4.0, observe=False, profile=FULL, nodes=PAIRS)


@pytest.mark.parametrize("how", ["is killed", "is stopped"])
def test_a_rank_that_fails_inside_a_node_is_named(how: str) -> None:
    outcomes = watch_ranks(4, fail_inside, how, doomed=[1], timeout_s=60.0)
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.kind == "RuntimeError", outcome
        assert "1" in DOWN.findall(outcome.error), outcome.error


# ---- guards ---------------------------------------------------------------------------------


def diverge(inside: bool) -> str:
    """One rank changes its weights: within a node this is an error, between nodes none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = build_model(ADAM)
    optimizer = build_optimizer(ADAM, model)
    profile = profile_in(ADAM, PAIRS)
    options = {"profile": profile, "nodes": 2, "timeout_s": 20.0, "compare_every": 1}
    model, optimizer = offbeat.prepare(model, optimizer, LocalSGD(period=3), **options)
    try:
        for t in range(6):
            workers.User(ADAM, model, optimizer, Loop()).iterate(t)
            if t == 1 and (workers.rank() in (2, 3) if not inside else workers.rank() == 3):
                with torch.no_grad():
                    model[-1].weight *= 1.5
    except RuntimeError as error:
        return str(error)
    finally:
        model.close()
    return "nothing"


@pytest.mark.parametrize("inside", [False, True], ids=["between nodes", "inside a node"])
def test_weights_are_compared_inside_nodes(inside: bool) -> None:
    found = found_by(("diverged", inside))
    if inside:
        words = "ranks that share a replica have diverged, although they apply the same gradients"
        assert all(words in one and "rank 3 and of rank 2" in one for one in found), found
    else:
        assert found == ["nothing"] * 4


def spoil(strategy: Strategy, case: Case) -> str:
    """Rank 2 has NaN in iteration 1."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    options = {"profile": profile_in(case, PAIRS), "nodes": 2, "timeout_s": 20.0}
    model, optimizer = offbeat.prepare(model, optimizer, strategy, compare_every=1, **options)
    error = "nothing"
    try:
        for t in range(4):
            optimizer.zero_grad()
            x, y = batch(case, workers.rank(), t)
            loss = loss_of(model, x, y)
            (loss * (math.nan if (t, workers.rank()) == (1, 2) else 1)).backward()
            optimizer.step()
    except RuntimeError as failure:
        error = str(failure)
    model.close()
    return error


# Averages of gradients, plain and of codes, and of parameters. Adam enlarges errors of codes.
SPOILT: tuple[tuple[Strategy, Case], ...] = (
    (WFBP(), ADAM),
    (WFBP(wire="int8"), CODED),
    (LocalSGD(), ADAM),
)


@pytest.mark.parametrize("i", range(len(SPOILT)), ids=[str(strategy) for strategy, _ in SPOILT])
def test_values_that_are_not_finite(i: int) -> None:
    named = found_by(("spoilt", i))
    # Averages inside a node do not reach the other node before the next average between them.
    for error in named if isinstance(SPOILT[i][0], WFBP) else named[2:]:
        assert "rank 2 sent values that are not finite" in error


# ---- what takes turns in one world ----------------------------------------------------------


def found_by(key: Any) -> list[Any]:
    """What each of four ranks has found."""
    calls: dict[Any, tuple[Any, ...]] = {
        **{("even", i): (train, *one) for i, one in enumerate(EVEN)},
        **{("measured", nodes): (measure, nodes) for nodes in ("auto", "mesh")},
        **{("diverged", inside): (diverge, inside) for inside in (False, True)},
        **{("spoilt", i): (spoil, *how) for i, how in enumerate(SPOILT)},
        "refused": (refuse_all,),
    }
    return one_of(4, call, tuple(calls.values()), [*calls].index(key))
