"""Order of a GPU's work, checked without a GPU: under strategies and codecs, in nodes, while
members change, and while a script saves, loads, evaluates and accumulates. Waits that are removed
on purpose are found missing.

The ranks are processes, with the links, servers and gossip threads of a real job. One world of
processes runs all jobs of a kind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from cases.happens_before import jobs
from cases.happens_before.checker import CHECKER, COMPUTE, Streams, Watch
from cases.member_jobs import epochs_of, membership_service
from cases.strategy_lists import GOSSIP, SERVED, STRATEGIES
from harness.parts import Scratch, setting_names, via_host
from harness.ranks import run_ranks
from torch import Tensor

from offbeat.membership import Epoch

Call = tuple[str, ...]

# Their messages are those of another strategy, in another order or at another time, and they
# compute what another strategy or a job below computes.
SENT_BY_OTHERS = (
    *("asc-wfbp", "bytescheduler", "ddp", "us-byte", "wfbp"),  # bsp, p3
    *("dreamddp", "eager", "fedavg", "local-sgd", "partial-sync"),  # `SPECIAL_CALLS`, `CODEC_CALLS`
    "diloco",  # `SPECIAL_CALLS`
    *("ps-bsp",),  # ssp
)
FREQUENT = {  # settings with which the averages of a strategy are in a few iterations
    "p3": "p3:slice_elements=40",
    "selsync": "selsync:delta=0.1",
    "ssp": "ssp:s=1:accumulate=2",
    "a2cid2": "a2cid2:wire=int8",
    "ad-psgd": "ad-psgd:topology=complete",
}


def texts_of(names: Iterable[str]) -> list[str]:
    """Texts of the strategies that have a job of their own, new ones too."""
    usual = {name: ":period=2" if "period" in setting_names(name) else "" for name in names}
    return [
        FREQUENT.get(name, f"{name}{more}")
        for name, more in usual.items()
        if name not in SENT_BY_OTHERS
    ]


STRATEGY_CALLS: list[Call] = [("train", text) for text in texts_of(STRATEGIES)]
GOSSIP_CALLS: list[Call] = [("gossip", text) for text in texts_of(GOSSIP)]
SERVED_CALLS: list[Call] = [("serve", text) for text in texts_of(SERVED)]
CODEC_CALLS: list[Call] = [
    ("train", "wfbp:wire=int8"),  # gathered codes of gradients
    ("train", "local-sgd:period=2:wire=int4"),  # of parameters, with anchors
    ("train", "wfbp:wire=randomk:0.3"),  # places that the host draws, summed up
    ("train", "wfbp:wire=powersgd:1"),  # two rounds, and a memory
]
SPECIAL_CALLS: list[Call] = [
    ("train", "dreamddp:period=3:due=delayed", "", "save"),
    ("train", "diloco:period=3:fragments=2:delay=1", "", "evaluate"),
    ("train", "cyclic:wire=int4", "", "load"),  # anchors that all receive
    ("train", "wfbp", "", "observe"),
    ("train", "wfbp:fusion=none", "", "accumulate"),
    ("train", "wfbp:fusion=none", "", "unused"),
]
# A rank that hands on what it has received.
CALLS_OF_3: list[Call] = [("train", "cyclic:wire=int4", "", "save")]
NODE_CALLS: list[Call] = [
    ("replicate", "wfbp"),  # gradients
    ("replicate", "dreamddp:period=3:due=forward:wire=int8"),  # codes of a part of each rank
    ("shard", "wfbp:fusion=none:wire=int8"),  # codes of shards
    ("shard", "diloco:period=2:fragments=1"),  # an outer step
    ("shard", "dreamddp:period=3:due=delayed"),  # during a forward that gathers shards
    ("shard", "selsync:delta=0.1"),  # norms of which each rank has a part
]
MEMBER_CALLS: list[Call] = [
    ("change_members", "local-sgd:period=2", "", "leave"),
    ("change_members", "local-sgd:period=2", "", "deaf"),  # the result is sent once more
    ("change_members", "wfbp:fusion=none", "", "deaf"),  # the average is repeated
    ("change_members", "dreamddp:period=3:due=delayed", "", "save"),
]
# One missing wait of each kind, in the smallest job that finds it.
PLANTED: list[Call] = [
    ("train", "bsp", "no_follow"),
    ("train", "wfbp:wire=int8", "no_release"),
    ("train", "bsp", "no_host_wait"),
    ("gossip", "a2cid2:wire=int8", "no_follow"),
    ("serve", "ssp:s=1:accumulate=2", "no_finish"),
    ("shard", "wfbp:fusion=none:wire=int8", "unmarked_side_stream"),
    ("change_members", "wfbp:fusion=none", "no_finish", "deaf"),
]
# Weights change during a forward on purpose, so this is what a missing order looks like.
LIVE: Call = ("gossip", "ad-psgd:topology=complete:weights=live")

CLEAN_CALLS = [
    *(*STRATEGY_CALLS, *CODEC_CALLS, *SPECIAL_CALLS, *GOSSIP_CALLS),
    *(*SERVED_CALLS, *CALLS_OF_3, *NODE_CALLS, *MEMBER_CALLS),
]
CALLS = [*CLEAN_CALLS, *PLANTED, LIVE]
# By kind of world: number of ranks, and calls. A world has few calls, because it must end within
# the time limit of a test on a loaded machine.
WORLDS: dict[str, tuple[int, list[Call]]] = {
    "strategies": (2, STRATEGY_CALLS),
    "codecs, scripts and gossip": (
        2,
        [
            one
            for one in CALLS
            if one[0] in ("train", "gossip") and one not in (*STRATEGY_CALLS, *CALLS_OF_3)
        ],
    ),
    "servers and members": (
        3, [*CALLS_OF_3, *(one for one in CALLS if one[0] in ("serve", "change_members"))]
    ),
    "nodes": (4, [one for one in CALLS if one[0] in ("replicate", "shard")]),
}  # fmt: skip
IMPORTS = {"nodes": ["cases.sharded_jobs"]}  # modules that take long to import


@cache
def outcomes(world: str) -> dict[Call, tuple[list[dict[str, Any]], list[Epoch]]]:
    """Findings of each rank and epochs of the members, by call."""
    ranks, calls = WORLDS[world]
    with ExitStack() as services:
        addresses = [
            services.enter_context(membership_service()) if call[0] == "change_members" else ""
            for call in calls
        ]
        given = [
            (*call, *[""] * (4 - len(call)), address) if address else call
            for call, address in zip(calls, addresses, strict=True)
        ]
        imports = IMPORTS.get(world, [])
        everyone = run_ranks(ranks, jobs.each, given, timeout_s=110.0, imports=imports)
        epochs = [epochs_of(address) if address else [] for address in addresses]
    found = zip(map(list, zip(*everyone, strict=True)), epochs, strict=True)
    return dict(zip(calls, found, strict=True))


def outcome(call: Call) -> tuple[list[dict[str, Any]], list[Epoch]]:
    ranks, epochs = outcomes(next(name for name, (_, calls) in WORLDS.items() if call in calls))[
        call
    ]
    for rank in ranks:
        assert "error" not in rank, rank["error"]
    return ranks, epochs


def findings(call: Call) -> list[dict[str, Any]]:
    return outcome(call)[0]


@pytest.mark.parametrize("call", CLEAN_CALLS, ids="-".join)
def test_every_access_is_ordered(call: Call) -> None:
    found = findings(call)
    for rank in found:
        assert rank["races"] == {}
    assert any(rank["operations"].get(COMPUTE, 0) > 100 for rank in found)


@pytest.mark.parametrize("call", [*PLANTED, LIVE], ids="-".join)
def test_every_missing_wait_is_found(call: Call) -> None:
    assert any(rank["races"] for rank in findings(call))


@pytest.mark.parametrize("call", STRATEGY_CALLS, ids="-".join)
def test_the_host_waits_for_decisions_alone(call: Call) -> None:
    """A wait in each iteration would let a GPU run out of work."""
    for rank in findings(call):
        places = {place.partition(", from")[0] for place in rank["waits"]}
        allowed = {
            # The norm of the gradients decides.
            "selsync:delta=0.1": "rules/changed.py",
            # A sum that passes from rank to rank is checked before it is used.
            "cyclic": "plan/semantics.py",
        }.get(call[1], "no place")
        assert all(allowed in place for place in places), places


def test_the_host_waits_once_for_unused_parameters() -> None:
    """A wait for each bucket would end the overlap of update and communication."""
    for rank in findings(("train", "wfbp:fusion=none", "", "unused")):
        [(place, count)] = rank["waits"].items()
        assert "buckets/gradients.py" in place
        assert count == jobs.LAST


@pytest.mark.parametrize("call", MEMBER_CALLS, ids="-".join)
def test_members_have_changed(call: Call) -> None:
    _, epochs = outcome(call)
    expected = {"leave": [3, 2], "deaf": [3, 3], "save": [3]}
    assert [len(epoch.members) for epoch in epochs] == expected[call[3]]


# ---- the checker itself -------------------------------------------------------------------------


def on_link(work: Any, after: Any, name: str = "link") -> Any:
    """Run work as the thread of a link does, and return its end."""
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(Streams().run(after, work)[1]), name=name)
    thread.start()
    thread.join()
    return ends[0]


@pytest.fixture
def device() -> Streams:
    CHECKER.reset()
    return Streams()


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_another_stream_is_kept_for_its_reader(device: Streams, kept: bool) -> None:
    """Memory that a link has allocated and compute reads, let go, and allocated by the link anew.

    This is what `Device.keep` is for. Without it, only waits of the host hide the error.
    """
    held: list[Tensor] = []
    with Watch():
        x = torch.ones(1000)

        def decode() -> None:
            held.append(x + 1)

        begin = device.mark()
        end = on_link(decode, begin)
        link = CHECKER.stream
        assert link == COMPUTE
        device.follow(end)
        if kept:
            device.keep(held)
        held.pop().mul(2.0)
    # The same link allocates again, after a release from before the product.
    CHECKER.threads.stream = next(name for name in CHECKER.operations if name != COMPUTE)
    with Watch():
        torch.zeros(1000)
    del CHECKER.threads.stream
    assert bool(CHECKER.races) == (not kept)


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_freed_after_copies_from_it(waits: bool) -> None:
    """The second tensor of a message needs more memory than the first one."""
    with jobs.on_streams() as patch, Watch():
        if not waits:
            jobs.no_host_wait(patch)
        CHECKER.reset()
        buffers, device = Scratch(pinned=True), Streams()
        send = via_host(lambda _: None, buffers)
        small, large = torch.ones(10), torch.ones(20)

        def send_both() -> None:
            send(small)
            send(large)

        on_link(send_both, device.mark())
    assert bool(CHECKER.races) == (not waits)


def test_reads_do_not_race(device: Streams) -> None:
    with Watch():
        x = torch.ones(10)
        begin = device.mark()
        on_link(lambda: x.sum(), begin)
        x.mean()
        assert CHECKER.races == {}
        x.add_(1)
    assert len(CHECKER.races) == 1


def test_parts_of_a_tensor_are_separate(device: Streams) -> None:
    with Watch():
        x = torch.ones(10)
        begin = device.mark()
        on_link(lambda: x[:5].add_(1), begin)
        x[5:].add_(1)
        assert CHECKER.races == {}
        x[4:6].add_(1)
    assert len(CHECKER.races) == 1


def test_a_wait_of_the_host_orders_what_it_launches_later(device: Streams) -> None:
    with Watch():
        x = torch.ones(10)
        end = on_link(lambda: x.add_(1), device.mark())
        device.await_mark(end)
        x.mean()
    assert CHECKER.races == {}
