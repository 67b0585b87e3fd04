"""Injection: how much is shared, by whom, and that it arrives."""

from __future__ import annotations

import math
import re
from collections import OrderedDict, namedtuple
from fractions import Fraction

import pytest
import torch
from cases.injecting import BATCH, INJECTION, share_samples
from harness.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data import Injected, Injection
from offbeat.data.batches import empty_message, leaves, pack, rebuild, unpack

quick = settings(max_examples=100, deadline=None)
percent = st.integers(0, 100)

# --- how much ------------------------------------------------------------------------------------


@quick
@given(percent, percent, st.integers(1, 300), st.integers(1, 16))
def test_the_effective_batch_is_kept(alpha, beta, batch, workers):
    injection = Injection(alpha / 100, beta / 100)
    sharing = max(1, (2 * alpha * workers + 100) // 200) if alpha and beta and workers > 1 else 0
    assert injection.sharing(workers) == sharing
    exact = batch / (1 + Fraction(beta, 100) * sharing)
    if exact < 1:
        with pytest.raises(ValueError, match=rf"^batch \({batch}\) must be at least"):
            injection.batch_size(batch, workers)
        return
    own = injection.batch_size(batch, workers)
    given = injection.given(batch, workers)
    assert own == math.ceil(exact)
    assert own + sum(given) == batch
    assert len(given) == sharing
    assert max(given, default=0) <= math.ceil(Fraction(beta, 100) * own)
    assert max(given, default=0) - min(given, default=0) <= 1


@pytest.mark.parametrize(
    ("alpha", "beta", "workers", "batch", "own", "given"),
    [
        (0.5, 0.5, 4, 32, 16, (8, 8)),
        (0.75, 0.75, 4, 32, 10, (8, 7, 7)),
        (0.5, 0.5, 10, 35, 10, (5,) * 5),
        (0.0, 0.5, 4, 32, 32, ()),
        (0.5, 0.0, 4, 32, 32, ()),
        (1.0, 1.0, 1, 32, 32, ()),
        (0.01, 1.0, 4, 32, 16, (16,)),
    ],
)
def test_batch_sizes_by_hand(alpha, beta, workers, batch, own, given):
    injection = Injection(alpha, beta)
    assert injection.batch_size(batch, workers) == own
    assert injection.given(batch, workers) == given


def test_sharers_are_drawn_evenly():
    injection = Injection(0.5, 0.5, seed=7)
    drawn = [injection.sharers(i, 4) for i in range(2000)]
    assert all(len(set(sharers)) == 2 for sharers in drawn)
    shares = [sum(n in sharers for sharers in drawn) / len(drawn) for n in range(4)]
    assert shares == pytest.approx([0.5] * 4, abs=0.05)
    assert drawn[:9] == [injection.sharers(i, 4) for i in range(9)]
    assert drawn != [Injection(0.5, 0.5, seed=8).sharers(i, 4) for i in range(2000)]


# --- packing -------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


def test_samples_survive_packing():
    generator = torch.Generator().manual_seed(0)
    batch = [
        torch.tensor([True, False, True]),  # three bytes: what follows is not aligned
        torch.randn(3, 2, 5, generator=generator, dtype=torch.float64),
        torch.arange(3, dtype=torch.int16),
        torch.randn(3, 4, generator=generator).to(torch.bfloat16),
        torch.zeros(3, 0),
        torch.arange(6.0).view(2, 3).T,
    ]
    message = pack(batch, [2, 0])
    assert message.numel() == empty_message(batch, 2).numel() == 2 * (1 + 80 + 2 + 8 + 0 + 8)
    for whole, part in zip(batch, unpack(message, batch, 2), strict=True):
        assert part.dtype == whole.dtype
        assert torch.equal(part, whole[[2, 0]])


def test_structures_are_kept():
    one, two = torch.zeros(2), torch.ones(2)
    batch = OrderedDict(a=[one], b=(Pair(one, {"c": one}),))
    made = rebuild(batch, iter([two, one, two]))
    assert type(made) is OrderedDict
    assert type(made["b"][0]) is Pair
    assert [int(leaf[0]) for leaf in leaves(made)] == [1, 0, 1]
    assert [int(leaf[0]) for leaf in leaves(batch)] == [0, 0, 0]


# --- three ranks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    return run_ranks(3, share_samples)


def test_shared_samples_arrive(world):
    for number in range(3):
        batches = [result["batches"][number] for result in world]
        sharers = INJECTION.sharers(number, 3)
        assert len(sharers) == 2
        for rank, made in enumerate(batches):
            first = 10_000 * rank + 100 * number
            assert made["ids"][:5] == list(range(first, first + 5))
            assert made["ids"][5:] == batches[0]["ids"][5:]
            assert made["odd"] == [i % 2 == 1 for i in made["ids"]]
            assert made["x"] == [[[float(i)] * 3] * 2 for i in made["ids"]]
            assert made["dtype"] == "torch.float32"
        shared = batches[0]["ids"][5:]
        assert len(set(shared)) == BATCH - 5
        givers = [i // 10_000 for i in shared]
        assert givers == [sharers[0]] * 3 + [sharers[1]] * 2
        assert {i // 100 % 100 for i in shared} == {number}


def test_the_shortest_loader_ends_the_epoch_of_all(world):
    assert [len(result["batches"]) for result in world] == [3, 3, 3]
    assert [result["state"] for result in world] == [{"iteration": 3}] * 3


def test_unlike_batches_are_refused_everywhere(world):
    for result in world:
        assert "rank 0 has 4 samples of bool, float32 2x3, int64" in result["unlike"]
        assert "rank 1, 2 have 5 samples" in result["unlike"]


def test_who_was_waited_for_is_named(world):
    for rank in (0, 1):
        words = world[rank]["lost"]
        assert words.startswith(f"rank {rank}: injection in iteration 4: ")
        heard = dict(re.findall(r"rank (\d) \([^)]*\): iteration (\d+)", words))
        assert heard["0"] == heard["1"] == "4"
        assert int(heard["2"]) < 4
        assert "timeout_s (2 s)" in words


# --- alone, and bad input ------------------------------------------------------------------------


def test_a_worker_alone_gets_its_own_batches():
    batches = [torch.arange(4)]
    injected = Injected(batches, Injection(0.5, 0.5), batch=4)
    assert list(injected) == batches
    assert len(injected) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Injection(1.1, 0.5), "alpha (1.1) must be from 0 to 1"),
        (lambda: Injection(-0.1, 0.5), "alpha (-0.1) must be from 0 to 1"),
        (lambda: Injection(0.5, math.nan), "beta (nan) must be from 0 to 1"),
        (lambda: Injection(0.5, 0.5, seed=-1), "seed (-1) must be an integer of at least 0"),
        (lambda: Injection(1, 1).batch_size(8, 8), "more would be injected than there is data"),
        (lambda: Injection(1, 1).batch_size(0, 8), "batch (0) must be an integer of at least 1"),
        (lambda: Injected([], Injection(0, 0), batch=1, timeout_s=0), "timeout_s (0) must be"),
        (lambda: leaves([torch.zeros(1), "text"]), "batch (str in it) must consist of tensors"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.usefixtures("no_world")
def test_sharing_needs_the_other_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match="must be initialized before 3 workers"):
        next(iter(Injected([torch.zeros(5)], INJECTION, batch=BATCH)))


def test_a_job_with_servers_cannot_share(monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setenv("OFFBEAT_SERVERS", "1")
    with pytest.raises(ValueError, match=r"servers \(1\) must be 0 with an injected"):
        next(iter(Injected([torch.zeros(5)], INJECTION, batch=BATCH)))
