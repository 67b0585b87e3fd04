"""Process groups of torch that meet through the service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.memberships import begin, hosted, run_threads

from offbeat.membership import Epoch, EpochReplacedError, LocalMembership, Membership
from offbeat.membership.store import RendezvousStore


@pytest.fixture(params=["memory", "service"])
def membership(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Membership]:
    if request.param == "memory":
        yield LocalMembership()
        return
    with hosted(tmp_path / "journal") as host:
        yield host.client()


def total(store: dist.Store, rank: int, size: int) -> float:
    """The sum of rank + 1 over all ranks, by a process group of gloo."""
    prefix = dist.PrefixStore("group", store)
    group = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=30))
    value = torch.tensor([rank + 1.0])
    group.allreduce([value]).wait()
    return value.item()


def test_groups_meet_in_each_epoch(membership: Membership) -> None:
    """Three ranks, then the two that are left: each epoch has keys of its own."""
    begin(membership, "a", "b", "c")
    found: dict[tuple[int, int], float] = {}

    def train(rank: int) -> None:
        store = RendezvousStore(membership.rendezvous(0), 30)
        found[0, rank] = total(store, rank, 3)
        if rank == 0:
            return
        epoch = membership.propose(Epoch(1, ("b", "c")))
        store = RendezvousStore(membership.rendezvous(epoch.number), 30)
        found[1, rank] = total(store, epoch.members.index("abc"[rank]), 2)

    run_threads(train, 3)
    assert found == {(0, 0): 6, (0, 1): 6, (0, 2): 6, (1, 1): 3, (1, 2): 3}


def test_survivors_of_a_meeting_go_on(membership: Membership) -> None:
    """A member that never arrives holds up nobody beyond the next epoch."""
    begin(membership, "a", "b", "c")
    store = RendezvousStore(membership.rendezvous(0), 60)
    timer = threading.Timer(0.05, membership.propose, [Epoch(1, ("b", "c"))])
    timer.start()
    with pytest.raises(EpochReplacedError) as caught:
        total(store, 1, 3)
    assert caught.value.epoch == Epoch(1, ("b", "c"))
    timer.join()


def test_the_store_answers_as_torch_expects(membership: Membership) -> None:
    begin(membership, "a")
    store, other = RendezvousStore(membership.rendezvous(0), 0.01), dist.HashStore()
    other.set_timeout(timedelta(seconds=0.01))
    for one in (store, other):
        one.set("k", "v")
        assert one.get("k") == b"v"
        assert one.add("n", 2) == 2
        assert one.compare_set("k", "v", "w") == b"w"
        assert one.compare_set("k", "v", "x") == b"w"
        assert one.check(["k", "n"])
        assert not one.check(["k", "m"])
        assert one.num_keys() == 2
        one.wait(["k"])
        one.wait(["k"], timedelta(seconds=1))
        with pytest.raises(dist.DistStoreError):
            one.get("m")
        with pytest.raises(dist.DistStoreError):
            one.wait(["k", "m"], timedelta(seconds=0.01))
        with pytest.raises(dist.DistStoreError):
            one.wait(["m"])
        prefix = dist.PrefixStore("p", one)
        prefix.set("k", b"\x00\xff")
        assert prefix.get("k") == b"\x00\xff"
        assert prefix.multi_get(["k", "k"]) == [b"\x00\xff"] * 2
        assert one.delete_key("k")
        assert not one.delete_key("k")
