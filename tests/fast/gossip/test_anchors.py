"""Exchanges of codes: the numbers against their equations, and what happens when one breaks."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from cases.gossip_jobs import come, cut, job, together, until, warm
from torch import Tensor

from offbeat.core.codecs import FP16, Codec, Int4, Int8
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.chunks import Wire
from offbeat.gossip.exchange import Exchange, Exchanges
from offbeat.gossip.graphs import constants, edge_rates, topology
from offbeat.gossip.state import AVERAGING, Mixing, State
from offbeat.gossip.view import State as EdgeState

SIZE = 700  # blocks that are not whole
CODECS = [FP16(), Int8(), Int4()]


class End:
    """A worker without sockets."""

    def __init__(self, x: Tensor, codec: Codec | None, mixing: Mixing = AVERAGING):
        wire = Wire([x], chunk_bytes=2048, codec=codec)
        self.x, momentum = x, mixing is not AVERAGING
        self.state = State([x], wire, mixing, momentum=momentum)
        self.exchanges, self.mixing = Exchanges(self.state, wire), mixing


def begin(ends: list[End], i: int, j: int, t: float = 0.0) -> tuple[Exchange, Exchange]:
    one, other = ends[i].exchanges, ends[j].exchanges
    coded = one.anchor_number(j) == other.anchor_number(i) != NEVER
    number = max(one.next_number(j), other.next_number(i))
    mixing = ends[i].mixing
    return (
        one.begin(j, number, t, mixing, coded=coded),
        other.begin(i, number, t, mixing, coded=coded),
    )


def send(one: Exchanges, other: Exchanges, chunk: int) -> bool:
    other.buffer(chunk)[:] = one.data(chunk)
    return other.apply_chunk()


def meet(ends: list[End], i: int, j: int, t: float = 0.0) -> int:
    """A whole exchange; its bytes."""
    begun, (one, other) = begin(ends, i, j, t), (ends[i].exchanges, ends[j].exchanges)
    sent = one.bytes
    assert sent == other.bytes
    for chunk in range(len(one.wire.chunks)):
        send(one, other, chunk)
        send(other, one, chunk)
    for exchange in begun:
        exchange.confirmed = True
    assert one.end_if_complete()
    assert other.end_if_complete()
    for end in (ends[i], ends[j]):
        end.state.refresh()
    return sent


def some(count: int, dtype: torch.dtype = torch.float32, spread: float = 0.1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    near = torch.randn(SIZE, generator=rng, dtype=dtype)
    return [near + spread * torch.randn(SIZE, generator=rng, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_exchanges_follow_the_equations(codec: Codec) -> None:
    """Anchors of each edge, in float64 and chunk by chunk, with what else changes x between."""
    flats = some(4, torch.float64)
    ends = [End(x, codec) for x in flats]
    spans = [chunk.span for chunk in ends[0].exchanges.wire.chunks]
    x = [flat.numpy().copy() for flat in flats]
    known: dict[tuple[int, int], np.ndarray] = {}  # of the first one's x, at both
    rng, noise = random.Random(1), np.random.default_rng(1)
    for _ in range(60):
        i = rng.randrange(4)
        j = (i + 1) % 4
        moved = 0.01 * noise.standard_normal(SIZE)
        x[i] += moved
        flats[i] += torch.from_numpy(moved)
        meet(ends, i, j)
        arrived = []
        for me, other in ((i, j), (j, i)):
            if (me, other) not in known:
                arrived.append(x[me].copy())
                continue
            anchor = known[me, other]
            decoded = [codec.round_trip(x[me][span] - anchor[span]) for span in spans]
            arrived.append(anchor + np.concatenate(decoded))
        m = arrived[0] - arrived[1]
        x[i], x[j] = x[i] - m / 2, x[j] + m / 2
        known[i, j], known[j, i] = arrived[0] - m / 2, arrived[1] + m / 2
        for flat, expected in zip(flats, x, strict=True):
            np.testing.assert_allclose(flat.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_both_ends_have_the_same_anchors_and_the_mean_is_kept(codec: Codec) -> None:
    flats = some(3)
    mean = torch.stack(flats).double().mean(0)
    ends, rng = [End(x, codec) for x in flats], random.Random(2)
    for _ in range(40):
        i, j = rng.sample(range(3), 2)
        meet(ends, i, j)
        one, other = ends[i].exchanges._anchors[j], ends[j].exchanges._anchors[i]
        assert one.number == other.number
        assert torch.equal(one.mine[0], other.theirs[0])
        assert torch.equal(one.theirs[0], other.mine[0])
    assert (torch.stack(flats).double().mean(0) - mean).abs().max() < 2e-6


def distances(codec: Codec | None, *, momentum: bool) -> tuple[list[float], float, float]:
    """To the mean on a ring of 8, every hundred exchanges; how far the mean has moved; and the
    share of the bytes."""
    flats, n, t, rng = some(8), 8, 0.0, random.Random(0)
    mean = torch.stack(flats).double().mean(0)
    mixing = constants(edge_rates(topology("ring", n), 1.0), n) if momentum else None
    found = Mixing(mixing.eta, mixing.alpha, mixing.alpha_tilde) if mixing else AVERAGING
    ends, course, sent = [End(x, codec, found) for x in flats], [], 0
    for count in range(401):
        if count % 100 == 0:
            for end in ends:
                end.state.mix_until(t)
            x = torch.stack(flats).double()
            course.append((x - x.mean(0)).square().sum(1).mean().sqrt().item())
        t += rng.expovariate(n / 2)
        i = rng.randrange(n)
        sent += meet(ends, i, (i + 1) % n, t)
    off = (torch.stack(flats).double().mean(0) - mean).abs().max().item()
    return course, off, sent / (401 * 4 * SIZE)


@pytest.mark.long
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize(("codec", "share"), [(Int8(), 0.32), (Int4(), 0.19)])
def test_workers_agree_as_fast_as_without_a_codec(
    codec: Codec, share: float, momentum: bool
) -> None:
    exact, _, whole = distances(None, momentum=momentum)
    found, off, sent = distances(codec, momentum=momentum)
    assert whole == 1
    assert sent < share
    assert off < 3e-6
    for one, other in zip(exact, found, strict=True):
        assert other < 3 * one + 1e-5
    assert found[-1] < 1e-4 * found[0]


@pytest.mark.parametrize("whole", [False, True])
def test_after_a_break_both_begin_anew(whole: bool) -> None:
    """Whether one end has all, which keeps it only if the other has, or neither."""
    flats = some(2, torch.float64)
    ends = [End(x, Int4()) for x in flats]
    one, other = (end.exchanges for end in ends)
    for _ in range(2):
        sent = meet(ends, 0, 1)
    assert sent == one.wire.bytes < one.wire.plain_bytes / 8
    flats[0] += 0.1
    before = [flat.clone() for flat in flats]
    begin(ends, 0, 1)
    for chunk in range(len(one.wire.chunks) if whole else 1):
        assert send(one, other, chunk) == (chunk == len(one.wire.chunks) - 1)
    send(other, one, 0)
    assert one.abort(1)
    assert other.abort(0)
    other.settle(0, one.completed_number(1))
    for end in ends:
        end.state.refresh()
    for flat, had in zip(flats, before, strict=True):
        torch.testing.assert_close(flat, had, rtol=0, atol=1e-12)
    assert one.anchor_number(1) == other.anchor_number(0) == NEVER
    assert meet(ends, 0, 1) == one.wire.plain_bytes
    torch.testing.assert_close(flats[0], flats[1], rtol=0, atol=1e-12)
    assert meet(ends, 0, 1) == one.wire.bytes


def test_who_has_other_anchors_sends_everything() -> None:
    """One end was told that the exchange is over, the other one was not."""
    ends = [End(x, Int8()) for x in some(2)]
    meet(ends, 0, 1)
    begun, (one, other) = begin(ends, 0, 1), (end.exchanges for end in ends)
    for chunk in range(len(one.wire.chunks)):
        send(one, other, chunk)
        send(other, one, chunk)
    begun[0].confirmed = True
    assert one.end_if_complete()
    assert other.abort(0)
    other.settle(0, one.completed_number(1))
    assert (one.anchor_number(1), other.anchor_number(0)) == (2, NEVER)
    assert meet(ends, 0, 1) == one.wire.plain_bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_numbers_that_are_not_finite_arrive_and_do_not_stay_in_anchors(
    codec: Codec, value: float
) -> None:
    flats = some(2)
    ends = [End(x, codec) for x in flats]
    meet(ends, 0, 1)
    flats[0][3] = value
    meet(ends, 0, 1)
    assert not flats[1][3].isfinite()
    assert ends[0].exchanges.anchor_number(1) == NEVER
    for x, again in zip(flats, some(2), strict=True):
        x.copy_(again)
    meet(ends, 0, 1)
    assert torch.isfinite(flats[0]).all()


def test_parameters_of_few_bits_have_anchors_of_32() -> None:
    flats = [x.bfloat16() for x in some(2)]
    ends = [End(x, Int8()) for x in flats]
    for _ in range(3):
        meet(ends, 0, 1)
    assert ends[0].exchanges._anchors[1].mine[0].dtype is torch.float32
    torch.testing.assert_close(flats[0], flats[1], rtol=2**-7, atol=2**-9)


# ---- over sockets ---------------------------------------------------------------------------


def gossip(codec: Codec, count: int, **settings: Any) -> Any:
    x = some(count, torch.float64)
    return x, job(nx.complete_graph(count), x, codec=codec, chunk_bytes=2048, **settings)


@pytest.mark.long
@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
def test_connections_that_break_do_not_move_the_mean(codec: Codec) -> None:
    x, made = gossip(codec, 3)
    start = torch.stack(x).mean(0)
    with made as workers:
        warm(workers)
        for round in range(8):
            counts = [worker.count() for worker in workers]
            until(lambda c=counts: all(w.count() > n + 3 for w, n in zip(workers, c, strict=True)))
            cut(workers[round % 3])
        last = [one.bytes for one in workers[0].gossip.counts.last]
        assert set(last) == {workers[0].gossip._exchanging.exchanges.wire.bytes, 8 * SIZE}
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], x[2])
    torch.testing.assert_close(x[0], start, rtol=0, atol=1e-12)


@pytest.mark.long
def test_who_dies_takes_its_anchors_along_and_who_comes_begins_with_everything() -> None:
    x, made = gossip(Int4(), 3, silent_s=1.0)
    with made as workers:
        warm(workers)
        until(lambda: all(worker.count() > 3 for worker in workers))
        dying = workers.pop().gossip
        dying._exchanging.on_chunk = lambda *_: setattr(
            dying, "_ended", True
        )  # in the middle of an exchange
        dying._thread.join()
        until(lambda: all(worker.gossip.view.dead_workers() == [2] for worker in workers))
        # The one under way, and one whose last confirmation the other end has not yet read.
        assert sum(worker.gossip.counts.broken for worker in workers) in (1, 2)
        assert [worker.gossip._exchanging.exchanges.anchor_number(2) for worker in workers] == [
            NEVER
        ] * 2
        new = come(workers, x[2], worker=2, chunk_bytes=2048, codec=Int4(), silent_s=1.0)
        until(lambda: new.count() > 5)
        sizes = [one.bytes for one in new.gossip.counts.last]
        assert sizes[0] == 8 * SIZE
        assert sizes.count(8 * SIZE) <= 2
        assert together([worker.consolidate for worker in workers]) == [None] * 3
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], x[2])


def test_anchors_of_a_worker_that_leaves_are_freed() -> None:
    _, made = gossip(Int8(), 3)
    with made as workers:
        warm(workers)
        exchanges = workers[0].gossip._exchanging.exchanges
        until(lambda: exchanges.anchor_number(2) != NEVER)
        assert together([worker.gossip.pause for worker in workers]) == [None] * 3
        assert exchanges.anchor_number(2) != NEVER
        workers[2].gossip.close()
        until(lambda: workers[0].gossip.view.state(2) is EdgeState.LEFT)
        assert exchanges.anchor_number(2) == NEVER
