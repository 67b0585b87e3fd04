"""Wires between processes: real links, real models."""

from __future__ import annotations

import numpy as np
from cases import wired
from cases.batches import Batch, Call
from harness.ranks import watch_ranks

from offbeat import WFBP, Cyclic, DreamDDP, FedAvg, LocalSGD, SelSync
from offbeat.core.codecs import WIRES

STRATEGIES = (
    WFBP(),
    WFBP(wire="int4"),
    LocalSGD(period=2, wire="topk:0.1"),
    LocalSGD(period=2, wire="powersgd:2"),
    SelSync(delta=0, wire="bf16"),
    DreamDDP(period=1, wire="int8"),
    FedAvg(local_steps=1, fraction=0.67, samples=(1, 2, 1), wire="int8"),
)
HANDED = tuple(
    Cyclic(stagger="least", **settings)  # by default planning simulates two plans in each rank
    for settings in (
        {},
        {"wire": "int4"},
        {"rule": "v1", "wire": "int8", "stages": 1},
        {"wire": "topk:0.1"},
    )
)
THREE = Batch(3)


@THREE.given(wired.train, STRATEGIES)
def test_replicas_are_equal_after_every_average_and_few_bytes_are_sent(call: Call) -> None:
    ranks = call.results
    first = ranks[0]
    for strategy, *found in zip(STRATEGIES, *ranks, strict=True):
        averaged = slice(1, None, 2) if isinstance(strategy, LocalSGD) else slice(None)
        mine = found[0]["hashes"][averaged]
        assert len(set(mine)) == len(mine) > 1
        if not isinstance(strategy, WFBP):  # there running statistics are each rank's own
            assert all(other["hashes"][averaged] == mine for other in found), str(strategy)
            assert all(np.array_equal(o["statistics"], found[0]["statistics"]) for o in found)
        assert np.mean(found[0]["losses"][-3:]) < np.mean(found[0]["losses"][:3]), str(strategy)
        assert found[0]["codecs"] == sorted(WIRES)
    plain, int4, topk, *_ = (found["bytes"] for found in first)
    assert int4 < plain / 5
    assert topk < plain / 4


@THREE.given(wired.train, HANDED)
def test_what_is_handed_on_takes_few_bytes_and_learns(call: Call) -> None:
    ranks = call.results
    for strategy, *found in zip(HANDED, *ranks, strict=True):
        assert all(other["consolidated"] == found[0]["consolidated"] for other in found)
        assert all(f["hashes"][-1] != found[0]["hashes"][-1] for f in found[1:]), str(strategy)
        assert np.mean(found[0]["losses"][-3:]) < np.mean(found[0]["losses"][:3]), str(strategy)
    plain, int4, int8, topk = (sum(rank[i]["bytes"] for rank in ranks) for i in range(4))
    assert int4 < plain / 5
    assert int8 < plain / 3
    assert topk < plain / 4


def test_weights_that_are_loaded_on_some_ranks_only_are_noticed():
    outcomes = watch_ranks(3, wired.loaded, Cyclic(stagger="least", wire="int4"), 1)
    said = [outcome.result or outcome.traceback for outcome in outcomes]
    assert "trained on" not in said
    assert any("weights were loaded on some ranks only" in words for words in said), said


def test_a_rank_killed_between_encoding_and_sending_takes_nothing_along():
    strategy = LocalSGD(period=2, wire="int4")
    outcomes = watch_ranks(2, wired.killed_between, strategy, 1, doomed=[1], timeout_s=40)
    assert outcomes[0].result is not None, outcomes[0].traceback
    words, kept = outcomes[0].result
    assert "rank 1" in words.lower()
    assert kept == [True, True]
