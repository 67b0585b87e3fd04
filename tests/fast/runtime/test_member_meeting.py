"""What the survivors of a failure agree on, from their reports alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.elastic import meeting as member_meeting
from offbeat.elastic.meeting import (
    Report,
    agreed_details,
    exchange_results,
    find_landed,
    meet,
)
from offbeat.elastic.node import node_of_process, rank_names, topology_of
from offbeat.elastic.repeated_averages import INSIDE_NODE
from offbeat.membership import Epoch, JoinRequest, LocalMembership, Rendezvous


def report(**values: Any) -> Report:
    return Report(**({"begun": 0, "first_iteration": 1, "lost_from": 0} | values))


def test_a_message_of_one_survivor_lands_on_all() -> None:
    reports = {
        "a": report(results={"net": 3, "net#1": 7}, lost_from=2),
        "b": report(results={"net": 4}, lost_from=3),
        "c": report(lost_from=1),
    }
    details = agreed_details(reports)
    assert details["lost_from"] == 3
    assert details["landed"] == {
        "net": {"link": "net", "order": 4, "holder": "b", "missing": ["a", "c"]},
        "net#1": {"link": "net#1", "order": 7, "holder": "a", "missing": ["b", "c"]},
    }
    assert details["united"] == details["ununited"] == []


def test_a_message_inside_a_node_lands_in_that_node() -> None:
    reports = {
        "a/0": report(results={"inside": 5, INSIDE_NODE: 0}),
        "a/1": report(results={"inside": 4}),
        "b/0": report(results={"inside": 9}),
        "b/1": report(results={"inside": 9}),
    }
    landed = agreed_details(reports)["landed"]
    assert {key: (e["holder"], e["missing"]) for key, e in landed.items()} == {
        "inside a": ("a/0", ["a/1"]),
        "inside b": ("b/0", []),
        f"{INSIDE_NODE} a": ("a/0", ["a/1"]),
    }


def test_a_rank_that_has_not_begun_the_epoch_needs_no_message_of_it() -> None:
    """It has all results of the epoch before, with numbers of other links."""
    reports = {
        "a": report(begun=1, results={"net": 2}, unions=0),
        "b": report(begun=0, results={"net": 8}, unions=3, has_united=True),
    }
    details = agreed_details(reports)
    assert details["begun"] == 1
    assert details["landed"]["net"] == {"link": "net", "order": 2, "holder": "a", "missing": []}
    assert details["united"] == details["ununited"] == []


def test_an_average_of_replicas_lands_on_all() -> None:
    reports = {
        "a": report(unions=2, has_united=True),
        "b": report(unions=1, has_united=False),
        "c": report(unions=2, has_united=True),
    }
    details = agreed_details(reports)
    assert (details["united"], details["ununited"]) == (["a", "c"], ["b"])


def test_a_result_is_sent_to_each_survivor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names, sent = ["a", "b", "c"], [torch.arange(3.0), torch.ones(2), torch.empty(0)]
    reports = {"a": report(results={"net": 3}), "b": report(results={"net": 4}), "c": report()}
    landed, own = find_landed(reports), threading.local()
    mail = {(source, target): Queue[Any]() for source in range(3) for target in range(3)}

    def send(tensor: torch.Tensor, target: int) -> None:
        assert tensor.numel()
        mail[own.rank, target].put(tensor.clone())

    def receive(tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(mail[source, own.rank].get(timeout=20.0))

    def exchange(rank: int) -> tuple[int, list[list[float]], set[str]]:
        own.rank, member = rank, SimpleNamespace(rank_name=names[rank], rank_names=names)
        results: Any = {"net": (4, sent)} if rank == 1 else {"net": (3, [])} if rank == 0 else {}
        like = [torch.zeros_like(tensor) for tensor in sent]
        received = exchange_results(member, landed, results, lambda *_: like)  # type: ignore[arg-type]
        order, tensors = results["net"]
        return order, [tensor.tolist() for tensor in tensors], received

    monkeypatch.setattr(member_meeting, "dist", SimpleNamespace(send=send, recv=receive))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(exchange, range(3)))
    result = 4, [[0.0, 1.0, 2.0], [1.0, 1.0], []]
    assert found == [(*result, {"net"}), (*result, set()), (*result, {"net"})]
    assert all(box.empty() for box in mail.values())


def test_a_joined_member_is_awaited_if_the_epoch_has_begun() -> None:
    """Its report may arrive last. Rank a has not begun the epoch with it, rank b has."""
    membership = LocalMembership()
    membership.propose(Epoch(0, ("a", "b"), details={"addresses": {}}))
    membership.request_join(JoinRequest("c"))
    before = membership.propose(Epoch(1, ("a", "b", "c"), details={"addresses": {}}))
    keys, looks = membership.rendezvous(1), list[str]()

    def post(name: str, begun: int) -> None:
        text = json.dumps(asdict(report(begun=begun)))
        keys.set(f"survivor/{name}", text.encode())

    def is_gone(name: str) -> bool:
        looks.append(name)
        if len(looks) == 3:
            post("c", 1)
        return False

    def propose(alive: list[str], *_: Any) -> Epoch:
        return membership.propose(Epoch(2, tuple(alive)))

    member: Any = SimpleNamespace(
        name="a", rank_name="a", rank_names=["a", "b", "c"], epoch=before, membership=membership,
        settings=SimpleNamespace(least=1), is_gone=is_gone, lost_ranks=lambda _: [],
        propose=propose,
    )  # fmt: skip
    post("b", 1)
    found = list[Epoch]()
    thread = threading.Thread(
        target=lambda: found.append(meet(member, {"a", "b"}, report(begun=0), lambda _: 0, 60.0))
    )
    thread.start()
    thread.join(30.0)
    assert [one.members for one in found] == [("a", "b", "c")]
    assert {*looks} == {"c"}


def test_a_look_asks_only_for_reports_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a wait for one rank of many asks for one key per look."""
    membership, names = LocalMembership(), [f"m{i}" for i in range(5)]
    before = membership.propose(Epoch(0, tuple(names), details={"addresses": {}}))
    keys, asked, missing = membership.rendezvous(0), list[int](), Rendezvous.missing
    for name in names[:4]:
        keys.set(f"survivor/{name}", json.dumps(asdict(report())).encode())

    def note(self: Rendezvous, looked_for: Sequence[str]) -> list[str]:
        asked.append(len(looked_for))
        return missing(self, looked_for)

    monkeypatch.setattr(Rendezvous, "missing", note)
    member: Any = SimpleNamespace(
        name="m0", rank_name="m0", rank_names=names, epoch=before, membership=membership,
        settings=SimpleNamespace(least=1), is_gone=lambda _: len(asked) > 2,
        lost_ranks=lambda _: [], propose=lambda alive, *_: membership.propose(Epoch(1, (*alive,))),
    )  # fmt: skip
    epoch = meet(member, {*names}, report(), lambda _: 0, 60.0)
    assert epoch.members == tuple(names[:4])
    assert asked == [5, 1, 1, 1]


@pytest.mark.parametrize("epochs", [1, 2, 40])
def test_a_member_that_reports_too_late_must_join_again(epochs: int) -> None:
    """Its process was stopped. The service keeps the keys of 2 epochs, and 16 epochs."""
    membership = LocalMembership()
    before = membership.propose(Epoch(0, ("a", "b")))
    for number in range(1, 1 + epochs):
        membership.propose(Epoch(number, ("a",)))
    member: Any = SimpleNamespace(
        name="b", rank_name="b", rank_names=["a", "b"], epoch=before, membership=membership,
        describe_rank=lambda name: f"rank 1 (member {name})", lost_ranks=lambda _: [],
    )  # fmt: skip
    words = r"continue without rank 1 \(member b\), whose report came too late; start it again"
    with pytest.raises(RuntimeError, match=words):
        meet(member, {"a", "b"}, report(), lambda _: 0, 60.0)


def test_ranks_of_members() -> None:
    sizes = {"a": 2, "b": 1, "c": 3}
    assert rank_names(sizes) == ["a/0", "a/1", "b", "c/0", "c/1", "c/2"]
    assert topology_of(sizes, "").nodes == ((0, 1), (2,), (3, 4, 5))


LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("nodes", "environ", "words"),
    [
        ([[0, 1], [2]], LOCAL, r"nodes \(\[\[0, 1\], \[2\]\]\) must be 'auto' or the number"),
        ("auto", {}, r"nodes \('auto'\) needs LOCAL_RANK \(''\) below LOCAL_WORLD_SIZE \(''\)"),
        (3, LOCAL, r"nodes \(3\) must be the number of ranks that the launcher has started on"),
        (2, LOCAL | {"WORLD_SIZE": "4"}, r"WORLD_SIZE \(4\) must be LOCAL_WORLD_SIZE \(2\)"),
    ],
)
def test_nodes_that_cannot_be_a_member(nodes: Any, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        node_of_process(nodes, environ, 1.0)


@pytest.mark.parametrize("nodes", [None, 1])
def test_a_member_of_one_rank_needs_no_store(nodes: Any) -> None:
    node = node_of_process(nodes, {}, 1.0)
    assert (node.rank, node.size, node.gather("x"), node.first("y", 0.0)) == (0, 1, ["x"], "y")
