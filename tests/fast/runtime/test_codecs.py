"""Codecs: on tensors as by their rules, averaged by ranks, within plans."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch
from cases.coding import LINEAR, PLAIN, SIZES, codec_of, profile_of
from harness.ranks import run_ranks
from harness.threads import memory_links
from oracle.quadratic import MOMENTUM, RATE, Quadratic, interpreted, model_of, ran
from oracle.quantized import quantized

from offbeat.core.codecs import WIRES
from offbeat.core.codecs.average import (
    OriginError,
    Part,
    Settings,
    average,
    equivalent_bytes,
    send,
)
from offbeat.core.codecs.rows import Rows
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.verify.check import check
from offbeat.core.verify.interpreter import Interpreter
from offbeat.profile import Link
from offbeat.strategies import (
    BSP,
    P3,
    WFBP,
    Cyclic,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    SelSync,
)

# ---- on tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_tensors_are_encoded_as_the_rule_says(name):
    """A part of a block, blocks and one number, and more than one pass."""
    used = codec_of(name)
    for size in (1, 257, 70_001):
        x = torch.randn(size, dtype=torch.float64) * 10
        x[0] = 0
        lost, found = x.clone(), torch.zeros_like(x)
        codes = torch.empty(used.bytes_of(size, 8), dtype=torch.uint8)
        code(used).encode(lost, codes)
        code(used).add(codes, found)
        np.testing.assert_allclose(found.numpy(), used.round_trip(x.numpy()), rtol=0, atol=1e-12)
        np.testing.assert_allclose(lost.numpy(), (x - found).numpy(), rtol=0, atol=1e-12)


# Blocks with and without a remainder, rows of which a pass has several, or one a part.
TABLES = [(3, 1), (4, 255), (3, 768), (8, 8_700), (2, 65_537)]


@pytest.mark.parametrize("name", PLAIN)
def test_tables_are_encoded_as_their_rows_are(name):
    """In memory with gaps."""
    way, used = code(codec_of(name)), codec_of(name)
    for count, size in TABLES:
        x = torch.randn(count, size, dtype=torch.float64)
        width = used.bytes_of(size, 8)
        rows = Rows(width, plain_bytes=3)
        codes = rows.codes(rows.make(count, x.device))
        lost, found, total = x.clone(), torch.ones_like(x), torch.ones(size, dtype=torch.float64)
        way.encode(lost, codes)
        way.add(codes, found)
        way.add_all(codes, total)
        by_row = torch.ones(size, dtype=torch.float64)
        for i, row in enumerate(x.clone()):
            own = torch.empty(width, dtype=torch.uint8)
            way.encode(row, own)
            alone = torch.ones(size, dtype=torch.float64)
            way.add(own, alone)
            way.add(own, by_row)
            assert torch.equal(own, codes[i])
            assert torch.equal(row, lost[i])
            assert torch.equal(alone, found[i])
        torch.testing.assert_close(total, by_row, rtol=0, atol=1e-12)


def test_what_is_lost_is_small():
    x = np.random.default_rng(0).normal(size=1000)
    for name, worst in (("bf16", 2**-8), ("fp16", 2**-10), ("int8", 1 / 250)):
        assert np.abs(codec_of(name).round_trip(x) - x).max() <= worst * np.abs(x).max()


def test_what_codes_take():
    sizes = {name: codec_of(name).bytes_of(1024) for name in WIRES}
    assert sizes["bf16"] == sizes["fp16"] == 2048
    assert (sizes["int8"], sizes["int4"], sizes["sign"]) == (1024 + 8, 512 + 8, 128 + 8)
    assert (sizes["topk"], sizes["randomk"]) == (102 * 8, 102 * 4)
    assert sizes["powersgd"] == (32 + 32) * 2 * 4


def test_values_that_a_format_cannot_hold_are_kept_for_later():
    x = np.array([1e6, 1.0, -1e6])
    assert codec_of("fp16").round_trip(x).tolist() == [65504.0, 1.0, -65504.0]
    tiny = np.full(3, 1e-38)
    assert codec_of("int4").round_trip(tiny).tolist() == [0.0] * 3
    for name, numbers in (("fp16", x), ("int4", tiny), ("int8", tiny)):
        given = torch.from_numpy(numbers).float()
        lost, found = given.clone(), torch.zeros_like(given)
        codes = torch.empty(codec_of(name).bytes_of(3), dtype=torch.uint8)
        code(codec_of(name)).encode(lost, codes)
        code(codec_of(name)).add(codes, found)
        assert found.tolist() == codec_of(name).round_trip(numbers).tolist()
        assert lost.tolist() == (given - found).tolist()


def test_places_of_randomk_are_drawn_anew_and_alike():
    used = codec_of("randomk")
    first, again, other = used.places(100, 3), used.places(100, 3), used.places(100, 4)
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(first.tolist())) == 10
    assert sorted(first // 10) == list(range(10))


def test_powersgd_finds_what_has_few_directions():
    rng = np.random.default_rng(1)
    low = (rng.normal(size=(20, 2)) @ rng.normal(size=(2, 20))).reshape(-1)
    memory = [{}]
    found, (lost,) = codec_of("powersgd").average([low], memories=memory)
    np.testing.assert_allclose(found, low, atol=1e-9)
    np.testing.assert_allclose(lost, 0, atol=1e-9)
    assert memory[0]["q"].shape == (20, 2)


# ---- averages -------------------------------------------------------------------------------


def averaged(name, via, given, rounds=2):
    """By rank: what arrived in the last round, what was lost; and by the rules."""
    ranks, used = len(given), codec_of(name)

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        memory, numbers = {}, torch.from_numpy(given[rank].copy())
        try:
            for i in range(rounds):
                plain = torch.full((3,), float(rank), dtype=torch.float64)
                given_mean = torch.full_like(numbers, nan)
                part = Part(numbers.clone(), plain, memory, given_mean)
                outcome = average(part, Settings(used, via, i, keeps=True), link.collectives)
                assert part.mean.data_ptr() == given_mean.data_ptr()
        finally:
            link.close()
        assert outcome.bytes == equivalent_bytes(used, via, len(given[0]), 8, 24, ranks)
        assert part.plain.tolist() == [(ranks - 1) / 2] * 3
        return part.mean.numpy(), part.numbers.numpy()

    found = run_ranks(ranks, life, where="threads")
    memories = [{} for _ in given]
    for i in range(rounds):
        mean, lost = used.average(given, via, i, memories)
    return found, mean, lost


# Every codec in every way in which it averages.
WAYS_OF = [(n, v) for n in WIRES for v in (("reduce",) if n in LINEAR else WIRES[n].ways)]
# What numbers of ranks and elements change, with a codec of blocks, one of places and a linear one.
SHAPED = [
    ("int8", "gather", 1, 1000),  # alone
    ("int4", "scatter", 1, 1000),
    ("powersgd", "reduce", 1, 1000),
    ("int8", "gather", 2, 1000),  # no shards
    ("int8", "scatter", 3, 80_000),  # more than one pass
    ("int4", "scatter", 4, 5003),  # blocks that ranks do not divide
    ("int4", "scatter", 5, 1500),  # ranks without a shard
    ("topk", "scatter", 5, 1500),
]


@pytest.mark.parametrize(
    ("name", "via", "ranks", "size"), [*((*one, 3, 1000) for one in WAYS_OF), *SHAPED]
)
def test_ranks_average_as_the_rule_says(name, via, ranks, size):
    rng = np.random.default_rng(2)
    given = [rng.normal(size=size) for _ in range(ranks)]
    found, mean, lost = averaged(name, via, given)
    for rank, (arrived, own) in enumerate(found):
        np.testing.assert_allclose(arrived, mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(own, lost[rank], rtol=0, atol=1e-12)
        assert arrived.tobytes() == found[0][0].tobytes()


@pytest.mark.parametrize(
    ("name", "via"),
    [("bf16", "gather"), ("bf16", "scatter"), ("randomk", "reduce"), ("powersgd", "reduce")],
)
def test_a_rank_without_finite_values(name, via):
    """The mean is NaN; of such a message nothing is kept."""
    used = codec_of(name)

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        try:
            x = torch.full((64,), float("nan") if rank == 1 else 2.0)
            part = Part(x, torch.full((3,), 4.0), {})
            bad = average(part, Settings(used, via, 0, keeps=True), link.collectives).bad
        finally:
            link.close()
        assert part.memory == {}
        return list(bad), part.mean.isnan().all().item(), part.plain.isnan().all().item()

    assert run_ranks(3, life, where="threads") == [([1], True, True)] * 3


def test_values_whose_sum_overflows_are_finite():
    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        large = torch.full((8,), 9e37)
        part = Part(large.clone(), large, {})
        try:
            outcome = average(
                part, Settings(codec_of("int8"), "gather", 0, keeps=True), link.collectives
            )
        finally:
            link.close()
        assert outcome.bad == []
        torch.testing.assert_close(part.mean, large, rtol=1e-2, atol=0)

    run_ranks(1, life, where="threads")


@pytest.mark.parametrize(
    ("name", "via"), [("int8", "gather"), ("int8", "scatter"), *((n, "reduce") for n in LINEAR)]
)
def test_anchors_of_different_origin_are_laid_to_ranks_of_the_job(name, via):
    """Their numbers in the group of the link are others."""

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        act = replace(link.collectives, members=[4, 7])
        try:
            # Small, large, and different in their last bits alone.
            for origins in ((0, 1), (1 << 62, 0), (5 << 40, 5 << 40 | 1 << 21)):
                part = Part(torch.ones(4), torch.empty(0), {})
                how = Settings(codec_of(name), via, 0, True, origin=origins[rank])
                with pytest.raises(OriginError, match=r"rank 7 .* rank 4"):
                    average(part, how, act)
        finally:
            link.close()

    run_ranks(2, life, where="threads")


def test_a_message_for_one_rank():
    """Rank 0 sends it to rank 1. Both learn that its values are not finite, and rank 1 that it has
    an anchor of another origin."""

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        how = Settings(codec_of("fp16"), "gather", 0, True, origin=7)

        def pass_on(numbers, how):
            part = Part(numbers if rank == 0 else torch.zeros(600), torch.full((2,), rank), {})
            return part, send(part, how, link.collectives, (0, 1), gives=rank == 0).bad

        try:
            infinite, bad = pass_on(torch.full((600,), float("inf")), how)
            assert bad == [0]
            assert infinite.mean.isnan().all()
            with pytest.raises(OriginError, match="rank 1") if rank == 1 else nullcontext():
                pass_on(torch.ones(600), replace(how, origin=7 + rank))
            part, bad = pass_on(x.clone(), how)
            assert bad == []
            return part
        finally:
            link.close()

    x = torch.randn(600)
    mine, theirs = run_ranks(2, life, where="threads")
    assert mine.mean.tolist() == theirs.mean.tolist()
    assert theirs.plain.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(mine.numbers + mine.mean, x, atol=1e-6)


# ---- within plans ---------------------------------------------------------------------------

STRATEGIES = [
    BSP(wire="int8"),  # gradients
    WFBP(wire="powersgd:2"),  # of shapes
    P3(wire="sign"),  # slices
    DeFT(wire="int4"),  # of several iterations
    LocalSGD(period=2, wire="randomk:0.2", state="averaged"),  # beside plain state
    LocalSGD(period=2, wire="int4", warmup=1),  # before the first anchor counts
    SelSync(wire="int4", scope="layer", max_period=2),  # votes
    DreamDDP(period=3, wire="int4", split=True),  # slices of parameters
    DreamDDP(period=3, wire="int8", due="forward"),  # later within the period
    DreamDDP(period=3, wire="int4", average="before_update", error_feedback=False),
    DreamDDP(period=3, wire="int4", due="delayed", delay=2, outer="0.7/0.5"),  # an outer step
    DiLoCo(period=3, wire="int8", fragments=2, delay=1, alpha=0.5),
    FedAvg(local_steps=2, wire="int8", fraction=0.67, samples=(1, 2, 3), state="averaged"),
    FedAvg(local_steps=(1, 2, 3), wire="topk:0.1", seed=1),
    Cyclic(wire="int8"),  # sends
    Cyclic(wire="sign", start="skip", clip=0.5),
    Cyclic(wire="bf16", stages=1, stagger="paper"),
    Cyclic(wire="fp16", table=((0, 0, 0), (0, 1, 0), (1, 0, 1)), error_feedback=False),
    Cyclic(wire="topk:0.1", rule="random"),  # parameters as they are
]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_plans_compute_what_the_interpreter_computes_and_replicas_stay_equal(strategy):
    ranks = 3
    profile = profile_of(ranks=ranks)
    if isinstance(strategy, DeFT):  # links slow enough that it merges
        profile = replace(profile, links=tuple(Link(one.name, 1e-3, 3e3) for one in profile.links))
    plan = strategy.plan(profile)
    assert check(plan) == []
    assert any(t.wire is not None for t in plan.transfers)
    task = Quadratic(SIZES, ranks, plan.prologue + min(3 * plan.period, 20) + 2)
    found = np.array(ran(plan, task))
    np.testing.assert_allclose(found, interpreted(plan, task), rtol=0, atol=1e-12)
    moved = [t.payload.buffer for t in plan.transfers]
    if set(moved) == {"grad"}:
        assert all(one.tobytes() == found[0].tobytes() for one in found[1:])
    elif all(
        t.after.point == "step" and t.before.lag == 0 and t.payload.buckets == range(3)
        for t in plan.transfers
    ):
        after = plan.prologue + 2 * plan.period
        assert all(one[after].tobytes() == found[0][after].tobytes() for one in found[1:])


def test_outer_steps_move_the_anchor_of_all_ranks_alike():
    plan = LocalSGD(period=2, wire="int4", outer="0.7/0.5").plan(profile_of(ranks=3))
    task = Quadratic(SIZES, 3, plan.prologue + 3 * plan.period)
    run = Interpreter(plan, model_of(task), 3)
    run.run(task.iterations)
    anchor = next(t.wire.anchor for t in plan.transfers)
    anchors = [worker.buffers[anchor][0] for worker in run.workers]
    assert all(anchor.tobytes() == anchors[0].tobytes() for anchor in anchors)
    assert not np.array_equal(anchors[0], model_of(task).start)
    # Changes are counted from where the outer step has led to, not from the average before it.
    np.testing.assert_array_equal(run.workers[0].buffers["common"][0], anchors[0])


ENOUGH = [
    BSP,
    lambda **k: FedAvg(local_steps=2, fraction=0.5, samples=(1, 3), **k),
    lambda **k: Cyclic(rule="v1", stages=1, **k),
]


@pytest.mark.parametrize("make", ENOUGH)
def test_a_wire_with_enough_bits_is_no_wire(make):
    task = Quadratic(SIZES, 2, 7)
    plain, wired = (
        np.array(ran(make(**more).plan(profile_of()), task)) for more in ({}, {"wire": "topk:1"})
    )
    np.testing.assert_allclose(wired, plain, rtol=0, atol=1e-12)


def in_4_bits(x):
    return quantized(torch.from_numpy(x), "int4").numpy()


@pytest.mark.parametrize(
    ("strategy", "samples", "via", "feedback"),
    [
        (LocalSGD(period=2, wire="int4"), (1, 1), "gather", True),
        (LocalSGD(period=2, wire="int4"), (1, 1, 1), "scatter", True),
        (FedAvg(local_steps=2, samples=(1, 3), wire="int4"), (1, 3), "gather", True),
        (
            FedAvg(local_steps=2, samples=(1, 3), wire="int4", error_feedback=False),
            *((1, 3), "gather", False),
        ),
    ],
    ids=str,
)
def test_local_steps_equal_their_equations(strategy, samples, via, feedback):
    """share (w - anchor) + e is sent as Q(...), and e is what that has lost; anchor += mean; w =
    anchor. With shards rank k sends Q(mean + f) of the k-th, and f is what that has lost."""
    ranks = len(samples)
    task = Quadratic(SIZES, ranks, 9)
    plan = strategy.plan(profile_of(ranks=ranks))
    assert {t.wire.arg("via") for t in plan.transfers} == {via}
    later = np.zeros(sum(SIZES))
    start, a, c = task.numbers
    anchor, errors = start.copy(), [np.zeros_like(start) for _ in range(ranks)]
    w, v = [start.copy() for _ in range(ranks)], [np.zeros_like(start) for _ in range(ranks)]
    expected = []
    for i in range(task.iterations):
        expected.append([x.copy() for x in w])
        for r in range(ranks):
            v[r] = MOMENTUM * v[r] + a[r] * (w[r] - c[r, i]) + task.decay * w[r]
            w[r] = w[r] - RATE * v[r]
        if i % 2:
            shares = [ranks * n / sum(samples) for n in samples]
            given = [shares[r] * (w[r] - anchor) + errors[r] for r in range(ranks)]
            sent = [in_4_bits(x) for x in given]
            if feedback:
                errors = [x - y for x, y in zip(given, sent, strict=True)]
            mean = sum(sent) / ranks
            if via == "scatter":
                mean = mean + later
                whole = np.concatenate([in_4_bits(mean[:512]), in_4_bits(mean[512:])])
                later, mean = mean - whole, whole
            anchor = anchor + mean
            w = [anchor.copy() for _ in range(ranks)]
    found = np.array(ran(plan, task)).swapaxes(0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "feedback"), [("v2", True), ("v1", False)])
def test_cyclic_equals_its_equations(rule, feedback):
    """Worker i sends Q(g_i + sum + e) and e is what that has lost; whoever sends a version w of a
    stage sends Q(w - u), where u is what the next one has, which becomes u + Q(w - u)."""
    ranks, task = 3, Quadratic(SIZES, 3, 9)
    strategy = Cyclic(wire="int4", rule=rule, error_feedback=feedback)
    plan = strategy.plan(profile_of(ranks=ranks))
    assert plan.fact("stages") == [[0, 1], [1, 2], [2, 3]]
    start, a, c = task.numbers
    edges = np.cumsum([0, *SIZES])
    stages = [slice(edges[g], edges[g + 1]) for g in range(3)]
    w, v, errors = start.copy(), np.zeros_like(start), np.zeros((3, len(start)))
    newest, before = ([start.copy() for _ in range(ranks)] for _ in range(2))  # what each has
    expected = []
    for t in range(task.iterations):
        seen = [x.copy() for x in newest]
        for place, rank in enumerate((1, 2, 0), 1):
            for g, stage in enumerate(stages):
                if strategy.rule == "v1" or g >= place:
                    seen[rank][stage] = before[rank][stage]
        expected.append(seen)
        total = np.zeros_like(start)
        for stage in stages:
            arrived = 0.0
            for rank in (1, 2):
                gradient = a[rank, stage] * (seen[rank][stage] - c[rank, t, stage])
                given = gradient + arrived + errors[rank, stage]
                arrived = in_4_bits(given)
                if feedback:
                    errors[rank, stage] = given - arrived
            total[stage] = arrived + a[0, stage] * (seen[0][stage] - c[0, t, stage])
        v = MOMENTUM * v + total / 3 + task.decay * w
        w = w - RATE * v
        before, newest = newest, [w.copy(), newest[1].copy(), newest[2].copy()]
        for g, stage in enumerate(stages):
            # Who needs a version first has it first: under v2 rank 2 where only it can use it.
            first, second = (2, 1) if strategy.rule == "v2" and g == 1 else (1, 2)
            for source, rank in ((0, first), (first, second)):
                newest[rank][stage] += in_4_bits(newest[source][stage] - newest[rank][stage])
    found = np.array(ran(plan, task)).swapaxes(0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_who_sends_parameters_knows_to_the_bit_what_the_next_one_has():
    plan = Cyclic(wire="int4", stages=1, rule="v1").plan(profile_of(ranks=3))
    task = Quadratic(SIZES, 3, 9)
    sent = [t.ranks for t in plan.transfers if t.payload.buffer == "param"]
    assert set(sent) == {(0, 1), (1, 2)}
    run = Interpreter(plan, model_of(task), 3)
    run.run(task.iterations)
    anchor, received = run.workers[1].buffers["anchor"][0], run.workers[2].buffers["param"][0]
    assert anchor.tobytes() == received.tobytes() != run.workers[0].buffers["param"][0].tobytes()
