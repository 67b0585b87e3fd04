"""Codecs: on tensors as by their rules, averaged by ranks, within plans, through failures."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from math import nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._inductor.config
from harness.threads import memory_links, run_ranks
from oracle.quadratic import MOMENTUM, RATE, Net, Quadratic, interpreted, model_of, ran
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.cli.texts import contestants
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.codecs import (
    WIRES,
    Codec,
    blocks,
    codec,
    fused,
    memory_of,
    pieces,
    register,
    way,
)
from offbeat.core.codecs.average import (
    OriginError,
    Part,
    Settings,
    average,
    equivalent_bytes,
    send,
)
from offbeat.core.codecs.cost import Encoded, coding_s
from offbeat.core.codecs.pieces import PIECE
from offbeat.core.codecs.rows import Rows
from offbeat.core.codecs.spares import Spares
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.measuring import codec_speed as measuring
from offbeat.core.rules.select import draw_samples
from offbeat.core.runtime.coding import CodedMessage, Coding
from offbeat.core.strategy.parsing import parse
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU
from offbeat.core.verify.check import check
from offbeat.core.verify.interpreter import Interpreter
from offbeat.plan import Moment, Payload, Plan, Wire, local, transfer
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.sim import predict_plan
from offbeat.strategies import (
    ASCWFBP,
    BSP,
    P3,
    WFBP,
    ByteScheduler,
    Cyclic,
    DeAR,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    PartialSync,
    SelSync,
)
from offbeat.strategies.compressible import with_wire
from offbeat.strategies.wire_profile import profile_for_wire

ARGS = {name: {"fraction": 0.1} for name, cls in WIRES.items() if "fraction" in cls.settings}
ARGS |= {"powersgd": {"rank": 2}}
PLAIN = [name for name in WIRES if not WIRES[name].linear]
LINEAR = [name for name in WIRES if WIRES[name].linear]
SIZES = (300, 7, 513)


def of(name):
    return codec(name, ARGS.get(name, {}))


def profile_of(sizes=SIZES, ranks=2, **more):
    buckets = [Bucket(f"b{i}", 0.01, 0.02, 4 * n) for i, n in enumerate(sizes)]
    links = (Link("net", 1e-3, 1e5), Link("aux", 1e-3, 1e5))
    return Profile(tuple(buckets), links, ranks, update_s=0.001, **more)


# ---- on tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 70_001])
def test_tensors_are_encoded_as_the_rule_says(name, size):
    used, x = of(name), torch.randn(size, dtype=torch.float64) * 10
    x[0] = 0
    lost, found = x.clone(), torch.zeros_like(x)
    codes = torch.empty(used.bytes_of(size, 8), dtype=torch.uint8)
    code(used).encode(lost, codes)
    code(used).add(codes, found)
    np.testing.assert_allclose(found.numpy(), used.round_trip(x.numpy()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(lost.numpy(), (x - found).numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("count", "size"), [(3, 1), (4, 255), (3, 768), (5, 1100), (2, 40_000)])
def test_tables_are_encoded_as_their_rows_are(name, count, size):
    """Of few and of many blocks, of whole ones and not, in memory with gaps."""
    way, used = code(of(name)), of(name)
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
        assert torch.equal(row, lost[i])
        assert torch.equal(alone, found[i])
    torch.testing.assert_close(total, by_row, rtol=0, atol=1e-12)


class CallCounter(TorchDispatchMode):
    """Counts the operations that torch runs in the block."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_for_a_table(name, count, size):
    """Operations that encode a table, and decode it to a table and to the sum of its rows."""
    x, used = torch.randn(count, size), of(name)
    codes, total = torch.empty(count, used.bytes_of(size), dtype=torch.uint8), torch.zeros(size)
    with CallCounter() as counter:
        code(used).encode(x, codes)
        code(used).add(codes, x)
        code(used).add_all(codes, total)
    return counter.calls


@pytest.mark.parametrize("name", ["int8", "int4", "sign"])
def test_a_table_beyond_one_pass_needs_two(name):
    """The shards of a bucket for eight ranks: 8 x 8,704 numbers are more than a piece."""
    half, whole = calls_for_a_table(name, 4, 8_700), calls_for_a_table(name, 8, 8_700)
    assert whole <= 2 * half + 8  # 8: both need a division into parts


@pytest.mark.parametrize("name", ["int8", "int4", "sign"])
@pytest.mark.parametrize(("count", "size"), [(8, 8_700), (5, 30_000), (9, 16_384), (2, 65_537)])
def test_divided_tables_change_no_bit(name, count, size):
    way, drawn = code(of(name)), torch.Generator().manual_seed(1)
    x, total = torch.randn(count, size, generator=drawn), torch.ones(size)
    given, found = x.clone(), torch.ones(count, size)
    codes = torch.empty(count, of(name).bytes_of(size), dtype=torch.uint8)
    way.encode(x, codes)
    way.add(codes, found)
    way.add_all(codes, total)
    by_row = torch.ones(size)
    for i, row in enumerate(given):
        own, alone = torch.empty_like(codes[i]), torch.ones(size)
        way.encode(row, own)
        way.add(own, alone)
        way.add(own, by_row)
        assert torch.equal(own, codes[i])
        assert torch.equal(row, x[i])
        assert torch.equal(alone, found[i])
    torch.testing.assert_close(total, by_row, rtol=1e-6, atol=1e-6)


def there_and_back(name, shape):
    """What is left of some numbers, their codes, and what is decoded of them."""
    drawn, width = torch.Generator().manual_seed(0), shape[-1]
    x, found, total = (torch.randn(s, generator=drawn) for s in (shape, shape, shape[-1:]))
    codes = torch.empty(*shape[:-1], of(name).bytes_of(width), dtype=torch.uint8)
    code(of(name)).encode(x, codes)
    code(of(name)).add(codes, found)
    code(of(name)).add_all(codes.view(-1, codes.shape[-1]), total)
    return x, codes, found, total


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", [(3 * PIECE,), (2 * PIECE + 257,), (3, PIECE + 300), (2, 5)])
def test_passes_over_several_pieces_change_no_bit(name, shape, monkeypatch):
    """A GPU takes more at once than a host does."""
    on_host = there_and_back(name, shape)
    for module in (pieces, blocks):
        monkeypatch.setattr(module, "elements_per_pass", lambda _: pieces.ON_GPU)
    assert all(map(torch.equal, there_and_back(name, shape), on_host))


def test_a_gpu_takes_more_at_once():
    """There a launch costs more than a cache saves, and memory for temporaries has a limit."""
    given = SimpleNamespace(shape=(3, pieces.ON_GPU + 1), is_cpu=False)
    assert [cut.stop - cut.start for cut in pieces.pieces(given)] == [pieces.ON_GPU, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_passes_change_no_bit(monkeypatch):
    """With the compiler for the host in place of the one for GPUs."""
    plain, compiled = there_and_back("int4", (2 * PIECE,)), set()

    def compile_it(work, **options):
        compiled.add(work.__name__)
        return compiler(work, **options)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_it)
    for module in (pieces, blocks):
        monkeypatch.setattr(module, "elements_per_pass", lambda _: pieces.ON_GPU)
    monkeypatch.setattr(fused, "is_worth_compiling", lambda _: True)
    # Without vector intrinsics: torch would compile programs to find out which ones there are.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
        assert all(map(torch.equal, there_and_back("int4", (2 * PIECE,)), plain))
    assert compiled == {"_scale", "_encode", "_add"}


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(fused, "is_worth_compiling", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    seen = []

    def broken(*_):
        raise TorchDynamoException("no compiler")

    @fused.fuse_kernels
    def work(_, x):
        seen.append(x)

    with pytest.warns(UserWarning, match="no compiler"):
        work(None, 1)
    work(None, 2)
    assert seen == [1, 2]


def test_what_fails_in_a_compiled_kernel_runs_once(monkeypatch):
    """The kernel may have changed its input, so a second run would encode other numbers."""
    monkeypatch.setattr(fused, "is_worth_compiling", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    x = torch.zeros(1)

    @fused.fuse_kernels
    def work(_, x):
        x += 1
        raise RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side"):
        work(None, x)
    assert x.item() == 1


@pytest.mark.parametrize(("name", "worst"), [("bf16", 2**-8), ("fp16", 2**-10), ("int8", 1 / 250)])
def test_what_is_lost_is_small(name, worst):
    x = np.random.default_rng(0).normal(size=1000)
    assert np.abs(of(name).round_trip(x) - x).max() <= worst * np.abs(x).max()


def test_what_codes_take():
    sizes = {name: of(name).bytes_of(1024) for name in WIRES}
    assert sizes["bf16"] == sizes["fp16"] == 2048
    assert (sizes["int8"], sizes["int4"], sizes["sign"]) == (1024 + 8, 512 + 8, 128 + 8)
    assert (sizes["topk"], sizes["randomk"]) == (102 * 8, 102 * 4)
    assert sizes["powersgd"] == (32 + 32) * 2 * 4


def test_values_that_a_format_cannot_hold_are_kept_for_later():
    x = np.array([1e6, 1.0, -1e6])
    assert of("fp16").round_trip(x).tolist() == [65504.0, 1.0, -65504.0]
    tiny = np.full(3, 1e-38)
    assert of("int4").round_trip(tiny).tolist() == [0.0] * 3
    for name, numbers in (("fp16", x), ("int4", tiny), ("int8", tiny)):
        given = torch.from_numpy(numbers).float()
        lost, found = given.clone(), torch.zeros_like(given)
        codes = torch.empty(of(name).bytes_of(3), dtype=torch.uint8)
        code(of(name)).encode(lost, codes)
        code(of(name)).add(codes, found)
        assert found.tolist() == of(name).round_trip(numbers).tolist()
        assert lost.tolist() == (given - found).tolist()


def test_places_of_randomk_are_drawn_anew_and_alike():
    used = of("randomk")
    first, again, other = used.places(100, 3), used.places(100, 3), used.places(100, 4)
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(first.tolist())) == 10
    assert sorted(first // 10) == list(range(10))


def test_powersgd_finds_what_has_few_directions():
    rng = np.random.default_rng(1)
    low = (rng.normal(size=(20, 2)) @ rng.normal(size=(2, 20))).reshape(-1)
    memory = [{}]
    found, (lost,) = of("powersgd").average([low], memories=memory)
    np.testing.assert_allclose(found, low, atol=1e-9)
    np.testing.assert_allclose(lost, 0, atol=1e-9)
    assert memory[0]["q"].shape == (20, 2)


# ---- averages -------------------------------------------------------------------------------


def averaged(name, via, given, rounds=2):
    """By rank: what arrived in the last round, what was lost; and by the rules."""
    ranks, used = len(given), of(name)

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

    found = run_ranks(ranks, life)
    memories = [{} for _ in given]
    for i in range(rounds):
        mean, lost = used.average(given, via, i, memories)
    return found, mean, lost


@pytest.mark.parametrize(
    ("ranks", "size"),
    [(1, 1000), (2, 1000), (3, 1000), (3, 80_000), (4, 5003), (5, 1500)],
    ids=["alone", "two", "three", "not at once", "odd blocks", "empty shards"],
)
@pytest.mark.parametrize(
    ("name", "via"),
    [(n, v) for n in WIRES for v in (("reduce",) if n not in PLAIN else WIRES[n].ways)],
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
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_rank_without_finite_values(name, via, leaves_out):
    """It does not count, or the mean is NaN; of such a message nothing is kept."""
    used = of(name)

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        x = torch.full((64,), float("nan") if rank == 1 else 2.0)
        part = Part(x, torch.full((3,), 4.0), {})
        try:
            how = Settings(used, via, 0, keeps=True, leaves_out=leaves_out)
            bad = average(part, how, link.collectives).bad
        finally:
            link.close()
        assert part.memory == {}
        return list(bad), part.mean[part.mean != 0].unique().tolist(), part.plain.tolist()

    for bad, mean, plain in run_ranks(3, life):
        assert bad == [1]
        assert mean == pytest.approx([2.0 if leaves_out else nan] * len(mean), nan_ok=True)
        assert plain == [4.0] * 3 if leaves_out else all(x != x for x in plain)


def test_values_whose_sum_overflows_are_finite():
    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        large = torch.full((8,), 3e38)
        part = Part(large.clone(), large, {})
        try:
            outcome = average(part, Settings(of("int8"), "gather", 0, keeps=True), link.collectives)
        finally:
            link.close()
        assert outcome.bad == []
        torch.testing.assert_close(part.mean, large, rtol=1e-2, atol=0)

    run_ranks(1, life)


@pytest.mark.parametrize(
    ("name", "via", "value"),
    [
        ("int8", "gather", 1e300),
        ("bf16", "scatter", 1e39),
        ("sign", "gather", 1e300),
        ("sign", "scatter", 1e300),
        ("powersgd", "reduce", 1e307),
    ],
)
def test_finite_values_that_codes_or_sums_cannot_hold(name, via, value):
    """All ranks are told, and what codecs keep for later is what it was."""
    used = of(name)

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        memory, outcomes = {}, []
        error = torch.zeros(512, dtype=torch.float64)
        transfer = LocalSGD(period=2).plan(profile_of()).transfers[0]
        try:
            for each in (1.0, value):
                x = torch.full((512,), each, dtype=torch.float64)
                kept, remembered = error.clone(), {k: v.clone() for k, v in memory.items()}
                part = Part(x, x[:0], memory)
                how = Settings(used, via, 0, keeps=True)
                coded = CodedMessage(transfer, [part], [([error], [])], how)
                outcomes.append(coded(link.collectives, leaves_out=False)[1])
        finally:
            link.close()
        assert torch.equal(error, kept)
        assert memory.keys() == remembered.keys()
        assert all(torch.equal(memory[k], remembered[k]) for k in memory)
        return [list(bad) for bad in outcomes]

    assert run_ranks(2, life) == [[[], [0, 1]]] * 2


@pytest.mark.parametrize(
    ("name", "via"), [("int8", "gather"), ("int8", "scatter"), *((n, "reduce") for n in LINEAR)]
)
@pytest.mark.parametrize("origins", [(0, 1), (1 << 62, 0), (5 << 40, 5 << 40 | 1 << 21)])
def test_anchors_of_different_origin_are_an_error(name, via, origins):
    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        part = Part(torch.ones(4), torch.empty(0), {})
        try:
            with pytest.raises(OriginError, match="rank 1"):
                average(
                    part, Settings(of(name), via, 0, True, origin=origins[rank]), link.collectives
                )
        finally:
            link.close()

    run_ranks(2, life)


@pytest.mark.parametrize(
    ("name", "via"), [("int8", "gather"), ("int8", "scatter"), (LINEAR[0], "reduce")]
)
def test_anchors_of_different_origin_are_laid_to_ranks_of_the_job(name, via):
    """Their numbers in the group of the link are others."""

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        part = Part(torch.ones(4), torch.empty(0), {})
        act = replace(link.collectives, members=[4, 7])
        try:
            with pytest.raises(OriginError, match=r"rank 7 counts .* than rank 4"):
                average(part, Settings(of(name), via, 0, True, origin=rank), act)
        finally:
            link.close()

    run_ranks(2, life)


# ---- within plans ---------------------------------------------------------------------------

STRATEGIES = [
    BSP(wire="int8"),
    WFBP(wire="int4", fusion="none"),
    WFBP(wire="powersgd:2"),
    ASCWFBP(wire="topk:0.1"),
    P3(wire="sign"),
    ByteScheduler(wire="bf16"),
    DeFT(wire="int4", forward=1, backward=1),
    LocalSGD(period=2, wire="int4", warmup=1),
    LocalSGD(period=2, wire="randomk:0.2", state="averaged"),
    PartialSync(period=2, wire="fp16"),
    SelSync(wire="int8", max_period=2),
    SelSync(wire="int4", scope="layer", max_period=2),
    DreamDDP(period=3, wire="int4"),
    DreamDDP(period=3, wire="int4", split=True),
    DreamDDP(period=3, wire="int8", due="forward"),
    DreamDDP(period=3, wire="int8", due="delayed", delay=2),
    DreamDDP(period=3, wire="int4", average="before_update", error_feedback=False),
    LocalSGD(period=2, wire="int4", outer="0.7/0.5"),
    DreamDDP(period=3, wire="int4", due="delayed", delay=2, outer="0.7/0.5"),
    DiLoCo(period=3, wire="int8", fragments=2, delay=1, alpha=0.5),
    DeAR(wire="int4", update="at_step"),
    FedAvg(local_steps=2, wire="int4"),
    FedAvg(local_steps=2, wire="int8", fraction=0.67, samples=(1, 2, 3), state="averaged"),
    FedAvg(local_steps=(1, 2, 3), wire="topk:0.1", seed=1),
    Cyclic(wire="int8"),
    Cyclic(wire="int4", rule="v1"),
    Cyclic(wire="sign", start="skip", clip=0.5),
    Cyclic(wire="bf16", stages=1, stagger="paper"),
    Cyclic(wire="fp16", table=((0, 0, 0), (0, 1, 0), (1, 0, 1)), error_feedback=False),
    Cyclic(wire="topk:0.1", rule="random"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_plans_compute_what_the_interpreter_computes_and_replicas_stay_equal(strategy):
    ranks = 3
    plan = strategy.plan(profile_of(ranks=ranks))
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


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if getattr(s, "outer", None)], ids=str)
def test_outer_steps_move_the_anchor_of_all_ranks_alike(strategy):
    plan = strategy.plan(profile_of(ranks=3))
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
    lambda **k: LocalSGD(period=2, **k),
    lambda **k: FedAvg(local_steps=2, fraction=0.5, samples=(1, 3), **k),
    Cyclic,
    lambda **k: Cyclic(rule="v1", stages=1, **k),
]


@pytest.mark.parametrize("make", ENOUGH)
def test_a_wire_with_enough_bits_is_no_wire(make):
    task = Quadratic(SIZES, 2, 7)
    plain, wired = (
        np.array(ran(make(**more).plan(profile_of()), task)) for more in ({}, {"wire": "topk:1"})
    )
    np.testing.assert_allclose(wired, plain, rtol=0, atol=1e-12)


def quantized(x):
    """4 bits, written down once more: blocks of 256, scales of 16 bits."""
    out = np.zeros_like(x)
    for a in range(0, len(x), 256):
        block = torch.from_numpy(x[a : a + 256])
        scale = float((block.abs().max() / 7).to(torch.bfloat16))
        for i, value in enumerate(block.tolist()):
            out[a + i] = round(value * (1 / scale)) * scale if scale else 0.0
    return out


@pytest.mark.parametrize(("ranks", "via"), [(2, "gather"), (3, "scatter")])
def test_local_sgd_equals_its_equations(ranks, via):
    """e + w - anchor is sent as Q(e + w - anchor), and e what that has lost; anchor += mean; w =
    anchor. With shards rank k sends Q(mean + f) of the k-th, and f is what that has lost."""
    period, task = 2, Quadratic(SIZES, ranks, 9)
    plan = LocalSGD(period=period, wire="int4").plan(profile_of(ranks=ranks))
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
        if i % period == period - 1:
            given = [w[r] - anchor + errors[r] for r in range(ranks)]
            sent = [quantized(x) for x in given]
            errors = [x - y for x, y in zip(given, sent, strict=True)]
            mean = sum(sent) / ranks
            if via == "scatter":
                mean = mean + later
                whole = np.concatenate([quantized(mean[:512]), quantized(mean[512:])])
                later, mean = mean - whole, whole
            anchor = anchor + mean
            w = [anchor.copy() for _ in range(ranks)]
    found = np.array(ran(plan, task)).swapaxes(0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("feedback", [True, False])
def test_fedavg_equals_its_equations(feedback):
    """share (w - anchor) + e is sent, of who is not drawn e alone; anchor += mean; w = anchor."""
    samples, task = (1.0, 3.0), Quadratic(SIZES, 2, 9)
    more = {"fraction": 0.5, "samples": samples, "seed": 5}
    plan = FedAvg(local_steps=2, wire="int4", error_feedback=feedback, **more).plan(profile_of())
    start, a, c = task.numbers
    anchor, errors = start.copy(), [np.zeros_like(start) for _ in range(2)]
    w, v = [start.copy() for _ in range(2)], [np.zeros_like(start) for _ in range(2)]
    expected, chosen = [], set()
    for i in range(task.iterations):
        expected.append([x.copy() for x in w])
        for r in range(2):
            v[r] = MOMENTUM * v[r] + a[r] * (w[r] - c[r, i]) + task.decay * w[r]
            w[r] = w[r] - RATE * v[r]
        if i % 2:
            weights = draw_samples(samples, 0.5, 5, i // 2)
            chosen.add(tuple(weights))
            share = [2 * weight / sum(weights) for weight in weights]
            given = [share[r] * (w[r] - anchor) + errors[r] for r in range(2)]
            sent = [quantized(x) for x in given]
            if feedback:
                errors = [x - y for x, y in zip(given, sent, strict=True)]
            anchor = anchor + sum(sent) / 2
            w = [anchor.copy() for _ in range(2)]
    assert len(chosen) == 2
    found = np.array(ran(plan, task)).swapaxes(0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [Cyclic(wire="int4"), Cyclic(wire="int4", rule="v1")], ids=str)
@pytest.mark.parametrize("feedback", [True, False])
def test_cyclic_equals_its_equations(strategy, feedback):
    """Worker i sends Q(g_i + sum + e) and e is what that has lost; whoever sends a version w of a
    stage sends Q(w - u), where u is what the next one has, which becomes u + Q(w - u)."""
    ranks, task = 3, Quadratic(SIZES, 3, 9)
    strategy = replace(strategy, error_feedback=feedback)
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
                arrived = quantized(given)
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
                newest[rank][stage] += quantized(newest[source][stage] - newest[rank][stage])
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


# ---- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("via", ["gather", "scatter"])
def test_a_message_that_fails_takes_nothing_along(via):
    """Errors are kept when the codes of all ranks are here, and not before."""

    def die(_):
        raise RuntimeError("connection closed by peer")

    act = Collectives({"all_gather": die}, lambda *_: None, exchange=die, rank=0, size=2)
    error = torch.ones(300)
    part = Part(torch.randn(300), torch.empty(0), {})
    coded = CodedMessage(None, [part], [([error], [])], Settings(of("int4"), via, 0, keeps=True))
    coded.transfer = replace(LocalSGD(period=2).plan(profile_of()).transfers[0])
    with pytest.raises(RuntimeError, match="closed by peer"):
        coded(act, leaves_out=False)
    assert error.tolist() == [1.0] * 300
    assert part.memory == {}


def test_changes_are_counted_from_weights_that_were_loaded():
    plan = LocalSGD(period=2, wire="int4").plan(profile_of())
    net = Net(np.zeros(sum(SIZES)), SIZES)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(3)])
    flat.adopt(plan.all_buffers)
    remembered = {memory_of(t): {"0": {"mean": 1.0}} for t in plan.transfers}
    memory = {**remembered, "of another rule": 1}
    coding = Coding(plan, flat, memory)
    [[residual]], [[anchor]] = flat.contents("residual"), flat.contents("anchor")
    residual.fill_(1.0)
    coding.restart_if_outdated()
    assert residual.sum() > 0
    assert memory.keys() >= remembered.keys()
    coding.mark_stale()
    for p in net.parameters():
        p.data.fill_(3.0)
    coding.restart_if_outdated()
    assert anchor.unique().tolist() == [3.0]
    assert residual.unique().tolist() == [0.0]
    assert memory == {"of another rule": 1}


def test_ranks_tell_what_their_changes_are_counted_from():
    """The same on all that begin alike, and on no others."""
    plan = LocalSGD(period=2, wire="int4").plan(profile_of())

    def origin(value):
        net = Net(np.full(sum(SIZES), value), SIZES)
        flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(3)])
        flat.adopt(plan.all_buffers)
        coding = Coding(plan, flat, {})
        coding.restart_if_outdated()
        first = coding.encode_message(
            plan.transfers[0], flat.copy_index("param"), 0
        ).settings.origin
        flat.contents("anchor")[0][0].add_(1.0)  # where training has led to since
        assert (
            coding.encode_message(plan.transfers[0], flat.copy_index("param"), 0).settings.origin
            == first
        )
        return first

    assert origin(0.0) == origin(0.0) != origin(1.0)


def test_numbers_of_16_bits_are_encoded_as_float32():
    plan = BSP(wire="int4").plan(profile_of((42,)))
    model = torch.nn.Linear(6, 7, bias=False).bfloat16()
    flat = Flat(model, [BucketSpec("b", ("weight",))])
    flat.adopt(plan.all_buffers)
    coding = Coding(plan, flat, {})
    [part] = coding.encode_message(plan.transfers[0], flat.copy_index("grad"), 0).parts
    assert part.numbers.dtype == torch.float32


@pytest.mark.parametrize("via", ["gather", "scatter"])
def test_what_a_message_would_take_is_known_before_it_is_sent(via):
    """Of codes and of running statistics, which are sent as they are."""
    plan = LocalSGD(period=2, wire="int4").plan(profile_of((42,)))
    wire = replace(plan.transfers[0].wire, args={"via": via})
    sent = replace(plan.transfers[0], wire=wire)
    plan = replace(plan, transfers=(sent,))
    alike = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        model = deepcopy(alike)
        names = tuple(name for name, _ in model.named_parameters())
        flat = Flat(model, [BucketSpec("b", names, ("1.running_mean", "1.running_var"))])
        flat.adopt(plan.all_buffers)
        coding = Coding(plan, flat, {})
        coding.restart_if_outdated()
        try:
            coded = coding.encode_message(sent, flat.copy_index("param"), 0)
            assert sum(part.plain.nbytes for part in coded.parts) == 2 * 5 * 4
            return coded(link.collectives, leaves_out=False)[2], coding.bytes_of(sent, 2)
        finally:
            link.close()

    for took, known in run_ranks(2, life):
        assert took == known


def test_receivers_have_what_all_have_after_consolidate():
    """What each receiver has is known anew; what was lost of sums is still owed."""
    plan = Cyclic(wire="int4").plan(profile_of(ranks=3))
    net = Net(np.zeros(sum(SIZES)), SIZES)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(3)])
    flat.adopt(plan.all_buffers)
    coding = Coding(plan, flat, {})
    [[residual]], [[anchor]] = flat.contents("residual_grad"), flat.contents("anchor")
    residual.fill_(1.0)
    for p in net.parameters():
        p.data.fill_(3.0)
    coding.restart_if_outdated()
    assert anchor.unique().tolist() == [0.0]
    coding.mark_united()
    coding.restart_if_outdated()
    assert anchor.unique().tolist() == [3.0]
    assert residual.unique().tolist() == [1.0]


def sent(give, take):
    """What two ranks make of one message from rank 0 to rank 1: parts, ranks with bad values."""

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        part, how = (give, take)[rank]
        try:
            return send(part, how, link.collectives, (0, 1), gives=rank == 0).bad, part
        finally:
            link.close()

    return run_ranks(2, life)


def part_of(x):
    return Part(x, torch.ones(2), {})


def test_a_message_for_one_rank():
    x, how = torch.randn(600), Settings(of("int4"), "gather", 0, True, origin=7)
    (bad, mine), (also, theirs) = sent((part_of(x.clone()), how), (part_of(torch.zeros(600)), how))
    assert (bad, also) == ([], [])
    assert mine.mean.tolist() == theirs.mean.tolist()
    assert theirs.plain.tolist() == [1.0, 1.0]
    np.testing.assert_allclose(mine.numbers + mine.mean, x, atol=1e-6)


def test_a_message_for_one_rank_with_values_that_are_not_finite():
    x, how = torch.full((600,), float("inf")), Settings(of("fp16"), "gather", 0, True)
    for bad, part in sent((part_of(x), how), (part_of(torch.zeros(600)), how)):
        assert bad == [0]
        assert part.mean.isnan().all()


def test_a_message_for_one_rank_that_has_loaded_other_weights():
    how = Settings(of("int4"), "gather", 0, True, origin=7)
    with pytest.raises(OriginError, match="rank 1 counts the changes of its parameters"):
        sent((part_of(torch.ones(4)), how), (part_of(torch.ones(4)), replace(how, origin=8)))


def test_an_anchor_outlives_another_plan_with_one():
    """Replicas may differ by then, so it must not be copied from them anew."""
    plan = LocalSGD(period=2, wire="int4").plan(profile_of())
    net = Net(np.zeros(sum(SIZES)), SIZES)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(3)])
    flat.adopt(plan.all_buffers)
    for p in net.parameters():
        p.data.fill_(3.0)
    flat.adopt(DreamDDP(period=2, wire="int4").plan(profile_of()).all_buffers)
    assert flat.contents("anchor")[0][0].unique().tolist() == [0.0]


# ---- plans and their costs ------------------------------------------------------------------


def test_parameters_have_an_anchor_and_errors_and_gradients_have_errors():
    plan = DreamDDP(period=2, wire="int4").plan(profile_of())
    buffers = {b.name: (b.kind, b.start, b.kept) for b in plan.buffers}
    assert buffers == {"residual": ("param", "zero", True), "anchor": ("param", "param", True)}
    plan = WFBP(wire="int4").plan(profile_of())
    assert {b.name: b.kind for b in plan.buffers} == {"residual_grad": "grad"}
    assert LocalSGD(period=2, wire="int4", error_feedback=False).plan(profile_of()).fact("wire")


def test_each_link_has_errors_of_its_own_where_two_carry_a_bucket():
    """Their messages have no order; a link that carries other buckets needs no room of its own."""

    def residuals(links):
        moves = [
            transfer(
                "grad",
                range(b, b + 1),
                after=Moment("grad", b),
                before=Moment("step"),
                phases=(phase,),
                link=link,
            )
            for (b, phase), link in links.items()
        ]
        plan = Plan("both", 2, tuple(moves), (local(2, Moment("step"), range(2)),), period=2)
        wired = with_wire(plan, Wire("int8"), profile_of((300, 300)))
        assert check(wired) == []
        return {t.wire.error for t in wired.transfers}

    apart = {(0, 0): "net", (0, 1): "net", (1, 0): "aux", (1, 1): "aux"}
    assert residuals(apart) == {"residual_grad"}
    both = {(0, 0): "net", (0, 1): "aux", (1, 0): "aux", (1, 1): "net"}
    assert residuals(both) == {"residual_grad of net", "residual_grad of aux"}


def test_what_wires_keep_is_counted_in():
    everything = 4 * sum(SIZES)
    made = [
        DreamDDP(period=3, due="delayed", wire=wire, error_feedback=feedback).plan(profile_of())
        for wire, feedback in (("none", True), ("int4", False), ("int4", True))
    ]
    extra = [plan.fact("memory_bytes") - made[0].fact("memory_bytes") for plan in made]
    assert extra == [0, everything, 2 * everything]  # anchor, residual


def test_cyclic_sends_sums_with_errors_and_parameters_as_what_the_next_one_lacks():
    plan = Cyclic(wire="int4", stagger="paper").plan(profile_of(ranks=3))
    wires = {(t.payload.buffer, t.wire and (t.wire.error, t.wire.anchor)) for t in plan.transfers}
    turn, *others = sorted(wires, key=str)[::-1]
    assert turn == ("sum", None)  # a word
    assert others == [("param", (None, "anchor")), ("grad", ("residual_grad", None))]
    assert plan.fact("wire") == "int4 by send"
    assert plan.fact("uncompressed") is None
    random = Cyclic(wire="int4", rule="random").plan(profile_of(ranks=3))
    assert random.fact("uncompressed") == ["parameters"]
    plain = Cyclic().plan(profile_of((30_000,) * 3, ranks=3))
    wired = Cyclic(wire="int4").plan(profile_of((30_000,) * 3, ranks=3))
    first, second = (
        predict_plan(p, profile_of((30_000,) * 3, ranks=3)).bytes_per_iteration
        for p in (plain, wired)
    )
    assert sum(second.values()) < sum(first.values()) / 7


@pytest.mark.parametrize("wire", ["randomk:0.1", "powersgd:2"])
def test_what_must_be_summed_up_cannot_be_handed_on(wire):
    with pytest.raises(ValueError, match="can only be all-reduced, and cyclic sends"):
        Cyclic(wire=wire)


def test_halves_have_no_codes():
    with pytest.raises(ValueError, match=r"update='at_step', or WFBP\(wire='int8'\)"):
        DeAR(wire="int8")


def test_few_ranks_gather_and_many_scatter():
    def via(ranks):
        plan = BSP(wire="int4").plan(profile_of((400_000,), ranks))
        return plan.transfers[0].wire.arg("via")

    assert via(2) == "gather"
    assert via(16) == "scatter"


def test_messages_cost_what_their_codes_take():
    profile = profile_of((256 * 1000,))
    plain, wired = (predict_plan(s.plan(profile), profile) for s in (BSP(), BSP(wire="int4")))
    assert plain.bytes_per_iteration["net"] == 256 * 1000 * 4
    assert wired.bytes_per_iteration["net"] == 130 * 1000
    outside_s = 0.01 + 0.02 + 0.001
    assert plain.iteration_s == pytest.approx(outside_s + 1e-3 + 10.24)
    assert wired.iteration_s == pytest.approx(outside_s + 0.5e-3 + 1.3)  # of a half
    slow = profile_of((256 * 1000,), codecs=(CodecSpeed("int4", 1e-6, 1e-6),))
    later = predict_plan(BSP(wire="int4").plan(slow), slow)
    assert later.iteration_s == pytest.approx(wired.iteration_s + 3 * 1.024)


INT8 = [Wire("int8", {"via": via}) for via in ("gather", "scatter")]
RANK2 = Wire("powersgd", {"rank": 2})
SLOW, SPEED = Link("net", 1e-3, 1e6), (1e-7, 2e-7, 3e-4, 5e-4, 7e-4)
FLOOR = Link("net", 1e-3, 1e9, small=((1000, 0.01), (100_000, 0.05)))
HALF = replace(SLOW, halves={"all_gather": (4e-4, 3e6)})
SMALL_HALF = replace(HALF, small_halves={"all_gather": ((1000, 0.01), (1_000_000, 0.4))})


@pytest.mark.parametrize(
    ("wire", "link", "given"),
    [
        *((wire, SLOW, {}) for wire in (*INT8, RANK2)),
        *((wire, link, {}) for wire in INT8 for link in (FLOOR, SMALL_HALF)),
        *((wire, link, {"net": 0.2}) for wire in (*INT8, RANK2) for link in (SLOW, HALF)),
    ],
)
def test_planners_are_told_what_messages_take(wire, link, given):
    """The links that they plan with take as long as the wire: also where a floor, a half of an
    all-reduce or a bucket was measured."""
    codecs = (CodecSpeed(wire.name, *SPEED),)
    buckets = (Bucket("b", 0.01, 0.02, 80_000, given),) * 2
    profile = Profile(buckets, (link,), 4, codecs=codecs)
    for run in (range(1), range(2)) if wire is not RANK2 else (range(1),):
        payload = Payload("grad", run)
        told_s = profile_for_wire(profile, wire).message_s(payload, "net")
        takes_s = Encoded(profile, payload, wire, "all_reduce").seconds("net")
        assert told_s == pytest.approx(takes_s, rel=5e-3)  # blocks are filled up


@pytest.mark.parametrize("link", [SLOW, FLOOR])
def test_planners_are_told_what_sends_take(link):
    profile = profile_of((20_000,) * 2, 4, codecs=(CodecSpeed("int8", *SPEED),))
    profile = replace(profile, links=(link,))
    wire, payload = Wire("int8", {}), Payload("grad", range(2))
    told_s = profile_for_wire(profile, wire, sends=True).message_s(payload, "net", "send")
    takes_s = Encoded(profile, payload, wire, "send").seconds("net")
    assert told_s == pytest.approx(takes_s, rel=5e-3)


@pytest.mark.parametrize("wire", [*INT8, RANK2])
def test_planners_are_told_what_messages_take_from_compute(wire):
    link = replace(SLOW, cpu_s_per_message=0.3, cpu_s_per_byte=1e-5)
    codecs = (CodecSpeed(wire.name, *SPEED),)
    profile = Profile((Bucket("b", 0.01, 0.02, 80_000),), (link,), 4, codecs=codecs)
    payload = Payload("grad", range(1))
    told_s = profile_for_wire(profile, wire).sending_s(payload, "net")
    takes_s = Encoded(profile, payload, wire, "all_reduce").sending_s("net")
    assert told_s == pytest.approx(takes_s, rel=5e-3)


def test_what_wires_add_to_a_message():
    """Another latency for another round; encoding and decoding, as often as codes go round."""
    profile = profile_of((20_000,), 4, codecs=(CodecSpeed("int8", 1e-6, 1e-9),))
    seconds = Encoded(profile, Payload("grad", range(1)), RANK2, "all_reduce").seconds("net")
    assert seconds == pytest.approx(2e-3 + (142 + 141) * 2 * 4 / 1e5)
    speeds = {way: coding_s(profile, of("int8"), way)[1] for way in WAYS}
    assert speeds == pytest.approx(
        {
            "gather": 1e-6 + 4e-9,
            "scatter": 1.25e-6 + 2e-9,  # a share of the mean is encoded again
            "reduce": 1e-6 + 1e-9,
            "send": 1e-6 + 1e-9,
            "encode": 1e-6,
        },
        rel=1e-9,
    )
    assert coding_s(profile, of("int4"), "gather") == (0, 0)


WAYS = ("gather", "scatter", "reduce", "send", "encode")


def test_what_wires_add_once():
    """A scatter encodes all shards at once and then the mean of one, decodes all shards twice, and
    is two messages."""
    profile = profile_of((20_000,), 4, codecs=(CodecSpeed("int8", 0, 0, 1.0, 100.0, 10_000.0),))
    found = {way: coding_s(profile, of("int8"), way)[0] for way in WAYS}
    assert found == {
        "gather": 10_101,
        "scatter": 20_202,
        "reduce": 10_101,
        "send": 10_101,
        "encode": 10_001,
    }


def test_speeds_are_seconds_per_byte_of_the_numbers(monkeypatch):
    """Those of float32 that go in, not of the codes; what a message takes beside its codes counts
    with encoding, and so do linear codecs, which do both in one."""
    few = 4 * measuring.FEW

    def taken(used, x, _):  # seconds to encode, to decode, of all
        size = 4 * x.numel()
        if used.linear:
            return 0.0, 0.0, 7.0 + 3 * size
        return 9000.0 + size, 9005.0 + 2 * size, 18020.0 + 4 * size

    monkeypatch.setattr(measuring, "_codec_seconds", taken)
    monkeypatch.setattr(measuring.Clock, "slower", lambda _: 1.5)
    for speed in measuring.codec_speeds(torch.device("cpu"), CPU()):
        found = [getattr(speed, name) / 1.5 for name in speed.__slots__[1:]]
        if WIRES[speed.name].linear:
            assert found == pytest.approx([3.0, 0, 0, 0, 7.0])
        else:
            assert found == pytest.approx([2.0, 2.0, 9000.0 - few, 9005.0, 15.0 + few])


def test_the_time_that_codecs_take_is_their_own():
    """What the thread sleeps is not counted, but how much longer it really took is told."""
    clock = measuring.Clock(CPU())

    def work():
        begin = time.thread_time()
        while time.thread_time() - begin < 2e-3:
            pass
        time.sleep(6e-3)

    assert 1.9e-3 < clock(work, 3) < 4e-3
    assert clock.slower() > 2


def test_planners_know_what_codes_take():
    """The bound is that of messages that are as short, and so are the sets."""
    profile = profile_of((20_000,) * 6)
    plain, wired = (s.plan(profile) for s in (DreamDDP(period=4), DreamDDP(period=4, wire="int4")))
    assert wired.bound_s < plain.bound_s / 2
    assert predict_plan(wired, profile).iteration_s < predict_plan(plain, profile).iteration_s / 2
    assert predict_plan(wired, profile).iteration_s >= wired.bound_s * (1 - 1e-9)


def test_what_is_sent_as_it_is_is_said():
    bucket = Bucket("b", 0.01, 0.02, 4000, buffer_bytes=80, state_bytes=8000)
    profile = Profile((bucket,), (Link("net", 1e-3, 1e6),), 2)
    plan = LocalSGD(period=2, wire="int4", state="averaged").plan(profile)
    assert plan.fact("uncompressed") == ["running statistics", "optimizer state"]
    assert [t.wire is None for t in plan.transfers] == [False, True]


def test_text():
    strategy = parse("dreamddp:period=10:wire=topk:0.01:error_feedback=false")
    assert strategy == DreamDDP(period=10, wire="topk:0.01", error_feedback=False)
    [contestant] = contestants("dreamddp:period=10:wire=topk:0.01", [])
    assert contestant.strategy == DreamDDP(period=10, wire="topk:0.01")
    assert parse("dreamddp:period=10:wire=int4") == DreamDDP(period=10, wire="int4")


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("int5", "int4"),
        ("topk:0", "fraction"),
        ("topk:1.5", "fraction"),
        ("topk", "topk:0.01"),
        ("powersgd:0", "rank"),
        ("powersgd:x", "rank"),
        ("int4:3", "no settings"),
        ("int4:", "no settings"),
    ],
)
def test_wires_that_cannot_be(wire, words):
    with pytest.raises(ValueError, match=words):
        WFBP(wire=wire)


@pytest.mark.parametrize("rank", [15, 40])
def test_a_rank_whose_factors_are_no_smaller_than_the_matrix(rank):
    """820 numbers are 29 rows of 29, and 58 x 14 = 812."""
    with pytest.raises(ValueError, match=rf"rank \({rank}\).* below 14.14.* 29 x 29"):
        BSP(wire=f"powersgd:{rank}").plan(profile_of())
    assert BSP(wire="powersgd:14").plan(profile_of()).fact("wire")


def test_error_feedback_is_a_yes_or_a_no():
    with pytest.raises(ValueError, match=r"error_feedback \('no'\)"):
        WFBP(wire="int4", error_feedback="no")


def test_one_bit_without_error_feedback_warns():
    with pytest.warns(UserWarning, match="error_feedback"):
        WFBP(wire="sign", error_feedback=False)


def test_a_lone_rank_encodes_nothing():
    assert all(t.wire is None for t in WFBP(wire="int4").plan(profile_of(ranks=1)).transfers)
    assert way("int4", {}) == "gather"


def test_an_empty_part_takes_no_time():
    """Of one byte, the first half."""
    link = Link("net", 1e-3, 1e6, cpu_s_per_message=0.5, cpu_s_per_byte=0.5)
    profile = Profile((Bucket("b", 0.0, 0.0, 1),), (link,), 2)
    halves = [
        Encoded(profile, Payload("grad", range(1), n, 2), Wire("topk", {"fraction": 0.5}), verb)
        for n in (0, 1)
        for verb in ("all_reduce", "send")
    ]
    assert [one.sending_s("net") > 0 for one in halves] == [False, False, True, True]
    assert [one.seconds("net") > 0 for one in halves] == [False, False, True, True]


@pytest.mark.parametrize("sends", [False, True])
def test_without_bytes_links_are_as_they_were(sends):
    bucket = Bucket("b", 0.1, 0.1, 0, {"net": 0.125})  # measured seconds of an empty message
    profile = Profile((bucket,), (Link("net", 1e-3, 1e6),), 2)
    assert profile_for_wire(profile, Wire("int4"), sends=sends) == profile


def test_memory_is_used_again():
    """As much as was in use at once; the smallest that is large enough."""
    spares, cpu = Spares(), torch.device("cpu")

    def take(size, dtype=torch.float32):
        x = spares.take(size, dtype, cpu)
        assert x.dtype == dtype
        assert x.shape == (size,)
        return x

    small, large = take(100), take(1000)
    places = {small.data_ptr(), large.data_ptr()}
    assert len(places) == 2
    spares.give(large)
    spares.give(small)
    one, other = take(90), take(500, torch.float64)
    assert one.data_ptr() == small.data_ptr()
    assert other.data_ptr() == large.data_ptr()
    assert take(10).data_ptr() not in places  # all are in use
    spares.give(other)
    spares.give(one)
    assert take(2000).data_ptr() != large.data_ptr()  # in place of the largest
    assert take(1000).data_ptr() != large.data_ptr()


@pytest.mark.parametrize("name", ["int4", "topk", "randomk", "powersgd"])
def test_averages_need_no_new_memory(name):
    """Of many messages of two sizes; nobody is handed what somebody else still has."""
    wire = {"topk": "topk:0.1", "randomk": "randomk:0.1", "powersgd": "powersgd:2"}.get(name, name)
    plan = DreamDDP(period=2, wire=wire, solver="optimal").plan(profile_of((3200, 6400)))
    net = Net(np.ones(2400), (800, 1600))
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(2)])
    flat.adopt(plan.all_buffers)
    coding = Coding(plan, flat, {})
    act = Collectives({"all_gather": lambda _: None, "all_reduce": lambda _: None}, lambda *_: None)
    before = 0
    for i in range(12):
        held = []
        for t in plan.transfers:
            copy = flat.copy_index("param")
            tensors, bad, *_ = coding.encode_message(t, copy, i)(act, leaves_out=False)
            assert not bad
            held.append((t, copy, tensors))
        assert len({x.data_ptr() for *_, (x, _) in held}) == len(held)
        for t, copy, tensors in held:
            coding.store_result(t, copy, "param", tensors)
            coding.give_back(tensors)
        kept = len(coding._spares._free)
        assert kept <= 2 * len(plan.transfers)
        assert i < 2 or kept == before
        before = kept


@pytest.mark.parametrize("name", ["int8", "clip"])
def test_a_name_is_registered_once(name):
    taken = type("Taken", (Codec,), {"name": name})
    with pytest.raises(ValueError, match=rf"codec \('{name}'\) must have a name that no rule"):
        register(taken)
