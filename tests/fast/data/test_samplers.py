"""Samplers: who reads what in which order, the same again, and on from the middle."""

from __future__ import annotations

import json
import math

import pytest
import torch
from harness.parts import place
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from offbeat.data import Chunks, DefDP, Dirichlet, Partition, SelDP

quick = settings(max_examples=40, deadline=None)
UNEVEN = Partition(([0, 3, 5, 7, 9], [1, 2], [4, 6, 8]))  # type: ignore[arg-type]
SHARES = [[0, 3, 5, 7, 9], [1, 2], [4, 6, 8]]


def everyone(kind, source, workers, **settings):
    return [kind(source, rank=n, world_size=workers, **settings) for n in range(workers)]


@quick
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 3), st.integers(0, 3))
def test_seldp_is_one_circle_begun_at_different_places(workers, more, seed, epoch):
    samples = workers + more
    selective = everyone(SelDP, samples, workers, seed=seed)
    default = everyone(DefDP, samples, workers, seed=seed, length="own")
    for sampler in [*selective, *default]:
        sampler.set_epoch(epoch)
    orders = [list(sampler) for sampler in selective]
    chunks = [list(sampler) for sampler in default]
    assert sorted(sample for chunk in chunks for sample in chunk) == list(range(samples))
    for n, order in enumerate(orders):
        assert order == [s for i in range(workers) for s in chunks[(n + i) % workers]]
        assert len(selective[n]) == samples
    for together in zip(*orders, strict=True):
        assert len(set(together)) == workers


def test_epochs_differ_and_come_again():
    sampler = DefDP(60, rank=1, world_size=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sampler.partition.shares[1].tolist()
    assert orders[0] != sorted(orders[0])
    other = DefDP(sampler.partition, rank=1, seed=1)
    assert list(other) != orders[0]


def test_an_iteration_without_set_epoch_repeats():
    sampler = SelDP(9, rank=0, world_size=2)
    assert list(sampler) == list(sampler)


def test_unshuffled():
    assert list(DefDP(7, rank=1, world_size=2, shuffle=False)) == [4, 5, 6]
    assert list(SelDP(7, rank=1, world_size=2, shuffle=False)) == [4, 5, 6, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("length", "lengths"), [("shortest", [2, 2, 2]), ("longest", [5, 5, 5]), ("own", [5, 2, 3])]
)
def test_lengths_of_uneven_shares(length, lengths):
    samplers = [DefDP(UNEVEN, rank=n, length=length) for n in range(3)]
    orders = [list(sampler) for sampler in samplers]
    assert [len(order) for order in orders] == [len(sampler) for sampler in samplers] == lengths
    for order, share in zip(orders, SHARES, strict=True):
        once = order[: len(share)]
        assert set(order) <= set(share)
        assert len(set(once)) == len(once)
        assert order == [once[i % len(once)] for i in range(len(order))]


def test_shortest_epochs_use_all_in_the_end():
    sampler, seen = DefDP(UNEVEN, rank=0), set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        seen |= set(sampler)
    assert seen == set(SHARES[0])


def test_counts_weigh_a_federated_average():
    assert DefDP(UNEVEN, rank=1).counts == (5, 2, 3)
    assert SelDP(UNEVEN, rank=1).counts == (10, 10, 10)


@pytest.mark.usefixtures("no_world")
def test_place_comes_from_the_launcher(monkeypatch):
    alone = DefDP(10)
    assert (alone.rank, alone.world_size, len(alone)) == (0, 1, 10)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = DefDP(10)
    assert (sampler.rank, sampler.world_size) == (2, 3)
    assert list(sampler) == list(DefDP(10, rank=2, world_size=3))


@pytest.mark.usefixtures("no_world")
@pytest.mark.parametrize("source", ["torchrun", "offbeat run", "torch.distributed"])
@pytest.mark.parametrize(("rank", "worker"), [(0, 0), (2, 2), (3, 0), (4, 1)])
def test_servers_have_no_share(monkeypatch, source, rank, worker):
    """They are the last two of five ranks, and a script also runs on them until `prepare`."""
    if source == "torch.distributed":
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", 5)):
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    else:
        prefix = "OFFBEAT_" if source == "offbeat run" else ""
        monkeypatch.setenv("WORLD_SIZE", "3")  # `offbeat run` counts workers only
        monkeypatch.setenv(f"{prefix}RANK", str(rank))
        monkeypatch.setenv(f"{prefix}WORLD_SIZE", "5")
    monkeypatch.setenv("OFFBEAT_SERVERS", "2")
    assert place() == (worker, 3)
    sampler = DefDP(9)
    assert (sampler.rank, sampler.world_size, len(sampler)) == (worker, 3, 3)


# --- on from the middle --------------------------------------------------------------------------


def makers():
    skewed = Dirichlet(0.3).partition([i % 4 for i in range(40)], 3)
    return {
        "defdp": lambda: DefDP(30, rank=1, world_size=3),
        "longest": lambda: DefDP(skewed, rank=0, length="longest"),
        "seldp": lambda: SelDP(skewed, rank=2),
    }


@quick
@given(st.sampled_from(sorted(makers())), st.integers(0, 3), st.floats(0, 1))
def test_resumed_as_if_never_stopped(name, epoch, part):
    make = makers()[name]
    sampler = make()
    sampler.set_epoch(epoch)
    whole = list(sampler)
    stop = math.floor(part * len(whole))
    running = iter(sampler)
    begun = [next(running) for _ in range(stop)]
    state = json.loads(json.dumps(sampler.state_dict() if stop else sampler.state_dict(used=0)))
    resumed = make()
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)  # as a loop over epochs does
    assert begun + list(resumed) == whole
    sampler.set_epoch(epoch + 1)
    resumed.set_epoch(epoch + 1)
    assert list(resumed) == list(sampler)


def test_resumed_in_a_loader():
    def batches(sampler):
        return [b.tolist() for b in DataLoader(range(50), batch_size=4, sampler=sampler)]  # type: ignore[arg-type]

    sampler = SelDP(50, rank=1, world_size=3)
    whole = batches(sampler)
    loader = iter(DataLoader(range(50), batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    begun = [next(loader).tolist() for _ in range(5)]
    resumed = SelDP(50, rank=1, world_size=3)
    resumed.load_state_dict(sampler.state_dict())
    assert begun + batches(resumed) == whole


def test_a_loop_says_what_it_has_used():
    sampler = DefDP(30, rank=0, world_size=1)
    whole = list(sampler)  # a loader has drawn everything ahead
    resumed = DefDP(30, rank=0, world_size=1)
    resumed.load_state_dict(sampler.state_dict(used=12))
    assert list(resumed) == whole[12:]


def test_a_finished_epoch_has_nothing_left():
    sampler = DefDP(6, rank=0, world_size=2)
    list(sampler)
    resumed = DefDP(6, rank=0, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DefDP(3, rank=0, world_size=4), "samples (3) must be at least 4"),
        (lambda: SelDP([], rank=0, world_size=1), "samples (0) must be at least 1"),
        (lambda: DefDP(9, rank=4, world_size=4), "rank (4) must be below world_size (4)"),
        (lambda: DefDP(9, rank=-1, world_size=4), "rank (-1) must be an integer of at least 0"),
        (lambda: DefDP(9, seed=-1), "seed (-1) must be an integer of at least 0"),
        (lambda: SelDP(UNEVEN), "partition (3 shares) must have one share per worker"),
        (lambda: DefDP(9, length="long"), "length ('long') must be one of"),  # type: ignore[arg-type]
        (lambda: DefDP(9).set_epoch(-1), "epoch (-1) must be an integer of at least 0"),
        (lambda: DefDP(9).state_dict(used=10), "position (10) must be at most the epoch's 9"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: SelDP(12, rank=0, world_size=2), "sampler"),
        (lambda: DefDP(12, rank=0, world_size=3), "world_size"),
        (lambda: DefDP(Chunks().partition(12, 2), rank=0, seed=1), "seed"),
        (lambda: DefDP(Chunks().partition(12, 2), rank=0, shuffle=False), "shuffle"),
        (lambda: DefDP(13, rank=0, world_size=2), "partition"),
        (lambda: DefDP(12, rank=0, world_size=2, length="own"), "length"),
    ],
)
def test_a_state_of_another_sampler_is_refused(other, name):
    state = other().state_dict()
    with pytest.raises(ValueError, match=f"^{name} of the sampler's state"):
        DefDP(12, rank=0, world_size=2).load_state_dict(state)
