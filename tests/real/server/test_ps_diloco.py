"""DiLoCo over servers: shards against plain programs in float64, workers as processes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.comparing import assert_close
from cases.models import Case
from cases.server_workers import Worked, work
from harness.ranks import run_ranks, watch_ranks
from oracle.training import Outer, local_sgd, replicas
from torch import Tensor

from offbeat.core.sim.separate_workers import Server
from offbeat.profile import Bucket, Link, Profile
from offbeat.server.layout import Layout
from offbeat.server.outer_rules import WEIGHT, CorrectingShard
from offbeat.server.parameters import Store
from offbeat.sim import predict
from offbeat.strategies import create, find

PSDiLoCo: Any = find("ps-diloco")
CASE = Case("mlp", "adam")


def parameters() -> list[torch.nn.Parameter]:
    rng = torch.Generator().manual_seed(3)
    shapes = ((3, 4), (5,), (2, 3))
    return [torch.nn.Parameter(torch.randn(s, generator=rng).double()) for s in shapes]


def store_of(strategy: Any, workers: int) -> tuple[Store, np.ndarray[Any, Any]]:
    held = parameters()
    optimizer = torch.optim.SGD(held, lr=0.1)
    layout = Layout([held], 1)
    start = np.concatenate([p.detach().numpy().ravel() for p in held])
    return strategy.make_store(layout, 0, optimizer, range(workers)), start


def change(rank: int, clock: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((rank, clock)).normal(size=size)


def push(store: Store, rank: int, clock: int, weight: float = 1.0) -> None:
    for shard in store.shards.values():
        size = shard.spec.stop - shard.spec.start
        given = torch.from_numpy(change(rank, clock, size)).clone()
        assert shard.push(rank, clock, given, [{WEIGHT: weight}])


def held(store: Store) -> np.ndarray[Any, Any]:
    return np.concatenate([s.parameters.numpy() for s in store.shards.values()])


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, store: Store) -> None:
        self.now_s = 0.0
        store.use_clock(lambda: self.now_s)


def test_a_quorum_steps_with_the_mean_weighted_by_tokens_after_the_grace_window() -> None:
    strategy = PSDiLoCo(quorum=2, grace_s=3.0, outer="0.7/0.9", tokens=(10, 20, 30, 40), period=4)
    store, w = store_of(strategy, 4)
    clock, v, size = Clock(store), np.zeros_like(w), len(w)
    # (seconds, rank, its clock, local steps); the groups are those of each step.
    rounds = [
        [(0.0, 0, 0, 4), (1.0, 1, 0, 4), (2.5, 2, 0, 3)],  # a third one within the window
        [(5.0, 3, 0, 4), (6.0, 0, 1, 2)],  # rank 3 was late
        [(10.0, 0, 2, 4), (10.5, 1, 1, 4), (10.6, 2, 1, 4), (10.7, 3, 1, 4)],  # all: at once
        [(20.0, 0, 3, 4), (20.5, 0, 4, 4), (21.0, 1, 2, 4)],  # rank 0 twice
    ]
    for number, pushes in enumerate(rounds):
        total, weights = np.zeros(size), 0.0
        for at_s, rank, its, steps in pushes:
            clock.now_s = at_s
            push(store, rank, its, strategy.weight(rank, steps))
            tokens = (10, 20, 30, 40)[rank] * steps
            total += tokens * (tokens / steps) * change(rank, its, size)
            weights += tokens * (tokens / steps)
        if len(pushes) < 4:
            assert store.lowest_clock == number
            assert 0 < store.wait_s <= 3.0
            clock.now_s += 2.9 if number != 0 else 1.4
            assert not store.advance()
            clock.now_s += 0.2
            assert store.advance()
        assert store.lowest_clock == number + 1
        assert store.wait_s == math.inf
        v = 0.9 * v + total / weights
        w = w - 0.7 * (total / weights + 0.9 * v)
        np.testing.assert_allclose(held(store), w, rtol=1e-12, atol=1e-12)


def test_workers_that_leave_do_not_hold_up_a_step() -> None:
    store, _ = store_of(PSDiLoCo(), 3)
    push(store, 0, 0)
    push(store, 2, 0)
    assert store.lowest_clock == 0
    store.leave(1)
    assert store.lowest_clock == 1
    for shard in store.shards.values():
        shard.skip(0, 1)
    assert store.lowest_clock == 1
    assert store.flush()
    assert store.lowest_clock == 2


def plain_heloco(d: np.ndarray[Any, Any], m: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """2606.00271: correction of one block."""
    if not m.any():
        return d
    length = math.sqrt(sum(x * x for x in d))
    u, v = d / length, m / math.sqrt(sum(x * x for x in m))
    c = math.fsum(u * v)
    confidence = length / (length + math.sqrt(sum(x * x for x in m)))
    if c >= 0.2:
        return d
    if c < 0:
        return d - min(-c * confidence, 1) * c * length * v
    share = min((1 - c) * confidence, 1)
    turned = (1 - share) * u + share * v
    return length * turned / math.sqrt(sum(x * x for x in turned))


def test_late_changes_are_corrected_against_the_momentum() -> None:
    store, w = store_of(PSDiLoCo(rule="heloco", outer="0.7/0.8"), 3)
    [shard] = store.shards.values()
    assert isinstance(shard, CorrectingShard)
    m, seen = np.zeros_like(w), set()
    blocks = [slice(p.at, p.at + p.stop - p.start) for p in shard.spec.pieces]
    for number in range(12):
        rank, its = number % 3, number // 3
        push(store, rank, its)
        for block in blocks:
            d = change(rank, its, len(w))[block]
            cosine = d @ m[block] / max(np.linalg.norm(d) * np.linalg.norm(m[block]), 1e-30)
            seen.add(int(np.digitize(cosine, [0, 0.2])))
            g = plain_heloco(d, m[block])
            m[block] = 0.8 * m[block] + 0.2 * g
            w[block] -= 0.7 * (g + 0.8 * m[block])
        np.testing.assert_allclose(held(store), w, rtol=1e-12, atol=1e-12)
    assert seen == {0, 1, 2}


def both(results: list[Any], workers: int) -> list[Worked]:
    assert results[workers:] == [0] * (len(results) - workers)
    return [worked for worked in results[:workers] if isinstance(worked, Worked)]


def test_with_all_workers_it_is_diloco() -> None:
    strategy = PSDiLoCo(period=3, outer="0.7/0.5")
    results = run_ranks(4, work, CASE, strategy, 6, 2)
    world = replicas(CASE, 2)
    local_sgd(world, range(6), period=3, outer=Outer(0.7, 0.5, nesterov=True))
    expected = dict(world[0].model.named_parameters())
    for worked in both(results, 2):
        assert_close({n: worked.model[n] for n in expected}, expected, "parameters")
        assert worked.clock == 2


@pytest.mark.parametrize(
    "strategy",
    [PSDiLoCo(period=2, quorum=1), PSDiLoCo(period=2, rule="heloco")],
    ids=str,
)
def test_replicas_agree_in_the_end(strategy: Any) -> None:
    a, b = both(run_ranks(3, work, Case("conv", "sgd"), strategy, 5, 1), 2)
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    start: dict[str, Tensor] = replicas(Case("conv", "sgd"), 1)[0].model.state_dict()
    assert any(not torch.equal(a.model[name], start[name]) for name in start)


def test_a_killed_worker_leaves_a_quorum_running() -> None:
    strategy = PSDiLoCo(period=1, quorum=1, silent_s=1.0)
    outcomes = watch_ranks(3, work, CASE, strategy, 6, 1, 1, doomed=[1], timeout_s=40)
    assert outcomes[1].kind == "silent"
    assert outcomes[0].error == outcomes[2].error == ""
    assert outcomes[0].result.clock == 6


PROFILE = Profile(
    tuple(Bucket(f"b{b}", 0.01, 0.02, 4000) for b in range(3)),
    (Link("net", 0.0, 1e9),),
    world_size=3,
    update_s=0.01,
    rank_scale=(1.0, 1.0, 4.0),
)


def test_a_quorum_does_not_wait_for_a_slow_worker() -> None:
    """Per clock of 2 iterations of .1 s; the third worker takes four times as long."""
    compute = np.array([[0.2, 0.2, 0.8]] * 4)
    server = Server(1.0, 1e12, (1e12,) * 3)
    ends = {
        k: PSDiLoCo(period=2, quorum=k).simulate_clocks(server, compute).ends_s for k in (2, None)
    }
    np.testing.assert_allclose(ends[2][0], [0.2, 0.4, 0.6, 0.8], atol=1e-6)
    np.testing.assert_allclose(ends[2][2], [0.8, 1.6, 2.4, 3.2], atol=1e-6)
    np.testing.assert_allclose(ends[None][0], [0.2, 1.0, 1.8, 2.6], atol=1e-6)
    np.testing.assert_allclose(ends[None][2], [0.8, 1.6, 2.4, 3.2], atol=1e-6)
    late = PSDiLoCo(period=2, quorum=1, grace_s=0.1).simulate_clocks(server, compute).ends_s
    # The first two wait .1 s for the third, which pushes together with them at .8 s.
    np.testing.assert_allclose(late[0], [0.2, 0.5, 0.8, 1.0], atol=1e-6)
    alone = PSDiLoCo(period=2, rule="heloco").simulate_clocks(server, compute).ends_s
    np.testing.assert_allclose(alone[2], [0.8, 1.6, 2.4, 3.2], atol=1e-6)


def test_predictions_count_local_updates() -> None:
    even = replace(PROFILE, rank_scale=())
    found = predict(PSDiLoCo(period=5), even, servers=1)
    assert found.iteration_s == pytest.approx(0.03 * 3 + 0.01, rel=0.05)
    assert found.iteration_s >= (found.bound_s or 0) > 0
    assert found.bytes_per_iteration == {"net": 12_000 / 5}
    slow = predict(PSDiLoCo(period=5, quorum=2), PROFILE, servers=1)
    assert slow.iteration_s >= (slow.bound_s or 0) > 0


@pytest.mark.parametrize("name", ["ssp", "ps-bsp", "ps-diloco"])
def test_memory_counts_the_flat_copies_of_a_worker(name: str) -> None:
    layout = Layout([parameters()], 1)
    one = sum(x.nbytes for x in layout.flats().values())
    profile = Profile((Bucket("all", 1e-3, 2e-3, one),), (Link("net", 1e-4, 1e8),), 4)
    copies = {"ssp": 2, "ps-bsp": 2, "ps-diloco": 3}[name]
    assert create(name, {}).memory(profile).buffers_bytes == copies * one


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quorum": 0}, "quorum"),
        ({"grace_s": -1}, "grace_s"),
        ({"tokens": (0.0,)}, "tokens"),
        ({"outer": None}, "outer"),
        ({"period": 0}, "period"),
        ({"rule": "heloco", "quorum": 2}, "heloco"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create("ps-diloco", settings)


def test_tokens_are_those_of_all_workers() -> None:
    with pytest.raises(ValueError, match=r"tokens \(2 numbers\) must have .* per worker \(3\)"):
        store_of(PSDiLoCo(tokens=(1, 2)), 3)
