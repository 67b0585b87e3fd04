"""Order of a GPU's work, checked without a GPU: under all strategies and codecs, in nodes, while
members change, and while a script saves, loads, evaluates and accumulates. Every wait that is
removed on purpose is found missing.

The ranks are processes, with the links, servers and gossip threads of a real job. One world of
processes runs all jobs of a kind.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.happens_before import jobs
from cases.happens_before.checker import CHECKER, COMPUTE, Streams, Watch
from cases.member_jobs import membership_service
from cases.strategy_lists import ALL, GOSSIP, SERVED, STRATEGIES
from harness.ranks import run_world
from torch import Tensor

from offbeat.core.codecs import WIRES
from offbeat.core.strategy.registry import module_names, setting_names
from offbeat.core.transport.collectives import Scratch, via_host

Call = tuple[str, ...]

STRATEGY_CALLS: list[Call] = [
    ("train", text)
    for text in (
        "asc-wfbp", "bsp", "bytescheduler", "cyclic", "ddp", "dear", "deft", "diloco:period=2",
        "dreamddp:period=2", "fedavg:local_steps=2", "local-sgd:period=2", "p3:slice_elements=40",
        "partial-sync:period=2", "selsync:delta=0.1", "us-byte", "wfbp",
    )
]  # fmt: skip
STRATEGY_CALLS += [
    ("train", f"{name}:period=2" if "period" in setting_names(name) else name)
    for name in module_names()
    if name in STRATEGIES
]
CODEC_CALLS: list[Call] = [
    ("train", text)
    for text in (
        "wfbp:wire=bf16", "selsync:delta=0.1:aggregate=gradients:wire=fp16", "wfbp:wire=int8",
        "local-sgd:period=2:wire=int4", "partial-sync:period=2:wire=sign", "wfbp:wire=topk:0.3",
        "wfbp:wire=randomk:0.3", "wfbp:wire=powersgd:1", "cyclic:wire=int4",
        "wfbp:wire=topk2:0.3", "wfbp:wire=dct-topk:0.3",
    )
]  # fmt: skip
SPECIAL_CALLS: list[Call] = [
    ("train", "local-sgd:period=2:state=averaged"),
    ("train", "dreamddp:period=3:due=delayed", "", "save"),
    ("train", "diloco:period=3:fragments=2:delay=1", "", "evaluate"),
    ("train", "cyclic:wire=int4", "", "load"),
    ("train", "wfbp", "", "observe"),
    ("train", "wfbp:fusion=none", "", "accumulate"),
    ("train", "p3:slice_elements=40", "", "evaluate"),
    ("train", "dreamddp:period=3:due=delayed", "", "staged save"),
    ("train", "wfbp:fusion=none", "", "unused"),
]
GOSSIP_CALLS: list[Call] = [
    ("gossip", "a2cid2"),
    ("gossip", "a2cid2:wire=int8"),
    ("gossip", "ad-psgd:topology=complete"),
]
SERVED_CALLS: list[Call] = [
    ("serve", "ps-bsp"),
    ("serve", "ssp:s=1:accumulate=2"),
    *(("serve", f"{name}:period=2") for name in module_names() if name in SERVED),
]
NODE_CALLS: list[Call] = [
    *(
        ("replicate", text)
        for text in (
            "wfbp", "dear", "local-sgd:period=2", "dreamddp:period=3:due=forward:wire=int8",
            "wfbp:wire=int8", "deft:forward=1:backward=1", "selsync:delta=0.1",
        )
    ),
    *(
        ("shard", text)
        for text in (
            "wfbp", "dear", "diloco:period=2:fragments=1",
            "dreamddp:period=3:due=delayed",
            "wfbp:fusion=none:wire=int8", "deft:forward=1:backward=1", "selsync:delta=0.1",
        )
    ),
]  # fmt: skip
MEMBER_CALLS: list[Call] = [
    ("change_members", "local-sgd:period=2", "", "leave"),
    ("change_members", "local-sgd:period=2", "", "deaf"),
    ("change_members", "wfbp:fusion=none", "", "deaf"),
]
PLANTED_CALLS: list[Call] = [
    ("train", "bsp", "no_follow"),
    ("train", "bsp", "no_release"),
    ("train", "bsp", "early_end"),
    ("train", "bsp", "early_release"),
    ("train", "bsp", "no_host_wait"),
    ("train", "dear", "no_follow"),
    ("train", "deft", "complete"),
    ("train", "wfbp:wire=int8", "complete"),
    ("train", "local-sgd:period=2:wire=int4", "no_release"),
    ("train", "dreamddp:period=3:due=delayed", "complete", "staged save"),
    ("train", "cyclic", "no_copy"),
    ("train", "cyclic", "complete"),
    ("train", "cyclic:wire=int4", "wait_for_sends", "load"),
    ("train", "dreamddp:period=3:due=delayed", "capture", "save"),
    ("gossip", "a2cid2", "no_gossip_order"),
    ("gossip", "a2cid2", "stale_gossip_order"),
]
PLANTED_AMONG_3: list[Call] = [
    ("train", "cyclic:wire=int4", "forgotten_sends", "save"),
    ("serve", "ssp:s=1", "collect"),
    ("serve", "ssp:s=1", "load_pulled"),
    ("serve", "ps-diloco:period=2", "push"),
]
PLANTED_IN_NODES: list[Call] = [
    ("replicate", "wfbp", "no_follow"),
    ("replicate", "wfbp", "no_release"),
    ("replicate", "wfbp", "early_release"),
    ("replicate", "wfbp", "early_end"),
    ("replicate", "wfbp", "no_host_wait"),
    ("replicate", "wfbp:wire=int8", "complete"),
    ("shard", "wfbp", "no_follow"),
    ("shard", "wfbp", "no_release"),
    ("shard", "wfbp", "early_release"),
    ("shard", "wfbp:fusion=none", "unmarked_side_stream"),
    ("shard", "dreamddp:period=3:due=delayed", "by_module"),
]
PLANTED_AMONG_MEMBERS: list[Call] = [
    ("change_members", "local-sgd:period=2", "complete"),
    ("change_members", "local-sgd:period=2", "no_wait_for_results", "deaf"),
    ("change_members", "wfbp:fusion=none", "no_wait_to_repeat", "deaf"),
    ("change_members", "wfbp:fusion=none", "failed_messages", "deaf"),
]
# Weights change during a forward on purpose, so this is what a missing order looks like.
LIVE: Call = ("gossip", "ad-psgd:topology=complete:weights=live")

PAIR_CALLS = [*STRATEGY_CALLS, *CODEC_CALLS, *SPECIAL_CALLS, *GOSSIP_CALLS]
CLEAN_CALLS = [*PAIR_CALLS, *SERVED_CALLS, *NODE_CALLS, *MEMBER_CALLS]
PLANTED = [*PLANTED_CALLS, *PLANTED_AMONG_3, *PLANTED_IN_NODES, *PLANTED_AMONG_MEMBERS]
IN_NODES = [*NODE_CALLS, *PLANTED_IN_NODES]
# By kind of world: number of ranks, calls, and modules that take long to import. A world has few
# calls, because it must end within the time limit of a test on a loaded machine.
WORLDS: dict[str, tuple[int, list[Call], list[str]]] = {
    "strategies": (2, STRATEGY_CALLS[::2], []),
    "other strategies": (2, STRATEGY_CALLS[1::2], []),
    "codecs": (2, CODEC_CALLS, []),
    "gossip": (2, GOSSIP_CALLS, []),
    "special": (2, SPECIAL_CALLS, []),
    "planted": (2, [*PLANTED_CALLS, LIVE], []),
    "servers": (3, [*SERVED_CALLS, *PLANTED_AMONG_3], []),
    "replicated nodes": (4, [call for call in IN_NODES if call[0] == "replicate"], []),
    "sharded nodes": (
        4, [call for call in IN_NODES if call[0] == "shard"], ["cases.sharded_jobs"]
    ),
    "members": (3, [*MEMBER_CALLS, *PLANTED_AMONG_MEMBERS], []),
}  # fmt: skip


@cache
def outcomes(world: str) -> dict[Call, list[dict[str, Any]]]:
    """Findings of each rank, by call."""
    ranks, calls, imports = WORLDS[world]
    with ExitStack() as services:
        given = [
            (*call, *[""] * (4 - len(call)), services.enter_context(membership_service()))
            if call[0] == "change_members"
            else call
            for call in calls
        ]
        everyone = run_world(jobs.each, ranks, given, timeout_s=110.0, imports=imports)
    return dict(zip(calls, map(list, zip(*everyone, strict=True)), strict=True))


def findings(call: Call) -> list[dict[str, Any]]:
    found = outcomes(next(name for name, (_, calls, _) in WORLDS.items() if call in calls))[call]
    for rank in found:
        assert "error" not in rank, rank["error"]
    return found


def test_all_strategies_and_codecs_are_checked() -> None:
    trained = {text.partition(":")[0] for _, text in (*STRATEGY_CALLS, *GOSSIP_CALLS[:1])}
    served = {text.partition(":")[0] for _, text in SERVED_CALLS}
    gossiping = {text.partition(":")[0] for _, text in GOSSIP_CALLS}
    assert trained | served | gossiping == {*ALL}
    assert served == {*SERVED}
    assert gossiping == {*GOSSIP}
    assert {*STRATEGIES} <= trained
    wires = {text.partition("wire=")[2].partition(":")[0] for _, text in CODEC_CALLS}
    assert wires == {*WIRES}
    assert {call[2] for call in PLANTED} == {*jobs.PLANTS}


def test_the_page_states_what_is_checked() -> None:
    methods = {call[1].partition(":")[0] for call in CLEAN_CALLS}
    ranks = sorted({count for count, _, _ in WORLDS.values()})
    sentence = (
        f"It checks {len(CLEAN_CALLS)} jobs of {ranks[0]} to {ranks[-1]} ranks: {len(methods)} "
        f"strategies, {len(WIRES)} codecs. No unordered access remains. {len(PLANTED)} waits that "
        "are removed on purpose, one at a time, are all found missing."
    )
    page = Path(__file__).parents[3] / "docs/accelerators.md"
    assert sentence in " ".join(page.read_text().split())


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
            "cyclic": "guards/finite.py",
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
    assert [rank["epochs"] for rank in findings(call)] == [1, 0 if call[3] == "leave" else 1, 1]


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
            jobs.no_wait_before_free(patch)
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
