"""Jobs of one node: all ranks share the one replica, and there is nothing to average between
nodes."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import pytest
import torch.distributed as dist
from cases import workers
from harness.ranks import one_of, run_ranks
from real.runtime.test_nodes import ADAM, NORMED, check, train

from offbeat import DDP, WFBP, PartialSync, Strategy
from offbeat.sim import predict

STRATEGIES = ("wfbp", "dreamddp", "diloco", "selsync")
CALLS = tuple((ADAM, name, ((0, 1),)) for name in STRATEGIES)


@pytest.mark.parametrize("i", range(len(CALLS)), ids=STRATEGIES)
def test_every_strategy_trains_by_the_mean_gradient(i: int) -> None:
    check(CALLS[i], one_of(2, train, CALLS, i))


def measure(strategy: Strategy) -> dict[str, Any]:
    """Train by a measured profile."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(workers.rank())}
    dist.init_process_group("gloo")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trained = workers.train(
            NORMED, strategy, range(6), observe=2, compare_every=1, min_bucket_bytes=64,
            nodes="auto",
        )  # fmt: skip
    return {
        "said": " ".join(said.getvalue().split()),
        "profile": trained.profile,
        "bits": workers.bits_of(trained.model.values(), "".join(trained.model)),
    }


@pytest.mark.parametrize("strategy", [WFBP(), PartialSync(period=2)], ids=str)
def test_a_job_measures_its_node(strategy: Strategy) -> None:
    first, second = run_ranks(2, measure, strategy)
    assert "1 node of 2 ranks (LOCAL_WORLD_SIZE): every rank holds the whole model" in first["said"]
    assert "there is no other node to average with" in first["said"]
    profile = first["profile"]
    assert (profile.world_size, profile.topology, profile.ranks) == (1, (2,), 2)
    assert predict(strategy, profile).iteration_s > 0
    assert predict(DDP(), profile).iteration_s > 0
    if strategy.synchronous:  # buffers, too, are those of rank 0
        assert first["bits"] == second["bits"]
