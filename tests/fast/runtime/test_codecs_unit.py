"""Codecs inside: passes over pieces, errors and anchors of a rank's messages."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.coding import PLAIN, SIZES, codec_of, profile_of
from harness.ranks import run_ranks
from harness.threads import memory_links
from oracle.quadratic import Net

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.codecs import WIRES, memory_of, pieces
from offbeat.core.codecs.average import Part, Settings, average
from offbeat.core.codecs.pieces import PIECE
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.measuring import codec_speed as measuring
from offbeat.core.runtime.coding import CodedMessage, Coding, StoredPart
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import Message
from offbeat.strategies import BSP, Cyclic, DreamDDP, LocalSGD

# ---- passes ---------------------------------------------------------------------------------


def there_and_back(name, shape):
    """What is left of some numbers, their codes, and what is decoded of them."""
    drawn, width = torch.Generator().manual_seed(0), shape[-1]
    x, found, total = (torch.randn(s, generator=drawn) for s in (shape, shape, shape[-1:]))
    codes = torch.empty(*shape[:-1], codec_of(name).bytes_of(width), dtype=torch.uint8)
    code(codec_of(name)).encode(x, codes)
    code(codec_of(name)).add(codes, found)
    code(codec_of(name)).add_all(codes.view(-1, codes.shape[-1]), total)
    return x, codes, found, total


@pytest.mark.parametrize("name", PLAIN)
def test_passes_over_several_pieces_change_no_bit(name, monkeypatch):
    """A GPU takes more at once than a host does."""
    for shape in ((2 * PIECE + 257,), (3, PIECE + 300), (2, 5)):
        with monkeypatch.context() as patch:
            on_host = there_and_back(name, shape)
            patch.setattr(pieces, "elements_per_pass", lambda _: pieces.ON_GPU)
            assert all(map(torch.equal, there_and_back(name, shape), on_host))


# ---- errors and anchors ---------------------------------------------------------------------


def flat_of(plan, value=0.0):
    """A model with equal weights, and its storage."""
    net = Net(np.full(sum(SIZES), value), SIZES)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(3)])
    flat.create_gradients()
    flat.adopt(plan.all_buffers)
    return net, flat


# Codes of blocks, codes of which the mean is encoded again, and a linear codec with a memory.
@pytest.mark.parametrize(
    ("name", "via", "value"),
    [("int8", "gather", 1e300), ("sign", "scatter", 1e300), ("powersgd", "reduce", 1e307)],
)
def test_finite_values_that_codes_or_sums_cannot_hold(name, via, value):
    """All ranks are told, and what codecs keep for later is what it was."""
    used = codec_of(name)

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
                coded(message := Message(transfer, 0, 0), link.collectives)
                outcomes.append(message.culprits)
        finally:
            link.close()
        assert torch.equal(error, kept)
        assert memory.keys() == remembered.keys()
        assert all(torch.equal(memory[k], remembered[k]) for k in memory)
        return [list(bad) for bad in outcomes]

    assert run_ranks(2, life, where="threads") == [[[], [0, 1]]] * 2


@pytest.mark.parametrize("name", ["sign", "int8"])
def test_large_values_of_the_storage_stay_finite(name):
    """The sum of their magnitudes overflows float32. Larger ones still are refused."""

    def life(world, rank):
        [link] = memory_links(world, rank, ["net"]).values()
        used, found = codec_of(name), []
        try:
            for value in (4e37, 9e37):
                x, error, anchor = torch.full((4096,), value), torch.zeros(4096), torch.ones(4096)
                views = {"payload": [x], "targets": [x], "errors": [error], "anchors": [anchor]}
                part = StoredPart(torch.empty(4096), torch.empty(0), {}, codec=used, **views)
                how = Settings(used, "gather", 0, keeps=True)
                bad = [*average(part, how, link.collectives).bad]
                found.append((bad, bool(torch.stack([error, anchor]).isfinite().all())))
        finally:
            link.close()
        return found

    assert run_ranks(2, life, where="threads")[0] == [([], True), ([0, 1], False)]


@pytest.mark.parametrize("via", ["gather", "scatter"])
def test_a_message_that_fails_takes_nothing_along(via):
    """Errors are kept when the codes of all ranks are here, and not before."""

    def die(_):
        raise RuntimeError("connection closed by peer")

    act = Collectives({"all_gather": die}, lambda *_: None, exchange=die, rank=0, size=2)
    error = torch.ones(300)
    part = Part(torch.randn(300), torch.empty(0), {})
    how = Settings(codec_of("int4"), via, 0, keeps=True)
    transfer = LocalSGD(period=2).plan(profile_of()).transfers[0]
    coded = CodedMessage(transfer, [part], [([error], [])], how)
    with pytest.raises(RuntimeError, match="closed by peer"):
        coded(Message(transfer, 0, 0), act)
    assert error.tolist() == [1.0] * 300
    assert part.memory == {}


def test_changes_are_counted_from_weights_that_were_loaded():
    plan = LocalSGD(period=2, wire="int4").plan(profile_of())
    net, flat = flat_of(plan)
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
        _, flat = flat_of(plan, value)
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
    flat.create_gradients()
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
        flat.create_gradients()
        flat.adopt(plan.all_buffers)
        coding = Coding(plan, flat, {})
        coding.restart_if_outdated()
        try:
            coded = coding.encode_message(sent, flat.copy_index("param"), 0)
            assert sum(part.plain.nbytes for part in coded.parts) == 2 * 5 * 4
            took = coded(Message(sent, 0, 0), link.collectives)
            return took, coding.bytes_of(sent, 2)
        finally:
            link.close()

    for took, known in run_ranks(2, life, where="threads"):
        assert took == known


def test_receivers_have_what_all_have_after_consolidate():
    """What each receiver has is known anew; what was lost of sums is still owed."""
    plan = Cyclic(wire="int4").plan(profile_of(ranks=3))
    net, flat = flat_of(plan)
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


def test_an_anchor_outlives_another_plan_with_one():
    """Replicas may differ by then, so it must not be copied from them anew."""
    plan = LocalSGD(period=2, wire="int4").plan(profile_of())
    net, flat = flat_of(plan)
    for p in net.parameters():
        p.data.fill_(3.0)
    flat.create_gradients()
    flat.adopt(DreamDDP(period=2, wire="int4").plan(profile_of()).all_buffers)
    assert flat.contents("anchor")[0][0].unique().tolist() == [0.0]


# ---- measurements ---------------------------------------------------------------------------


def test_speeds_are_seconds_per_byte_of_the_numbers(monkeypatch):
    """Those of float32 that go in, not of the codes; what a message takes beside its codes counts
    with encoding, and so do linear codecs, which do both in one."""
    few = 4 * measuring.FEW

    def taken(used, x, *_):  # seconds to encode, to decode, of all
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
