"""Collectives of two levels: averages over all ranks, each node's bytes once between nodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import Tensor

from offbeat.core.codecs import codec
from offbeat.core.codecs.average import Part, Settings, equivalent_bytes
from offbeat.core.runtime.coding import CodedMessage
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.collectives import Native
from offbeat.core.transport.control import new_group
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.core.transport.link import Message
from offbeat.core.transport.topology import NodeClaim, Topology
from offbeat.plan import INSIDE, Moment, transfer, vote_channel

HOST = torch.device("cpu")
RANKS = 6
TOPOLOGIES = (
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2), (3, 4, 5)),
    ((1, 3, 5), (0, 2, 4)),
    ((0,), (1, 2), (3, 4, 5)),
    ((0, 1), (2, 3, 4, 5)),
)
# Fewer elements than shards, uneven shards, and shards that pass the ring.
SIZES = (1, 2, 7, 30_001)


def values(rank: int, size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng((rank, size)).normal(size=size))


def use_links() -> list[dict[str, Any]]:
    """By topology: results of all verbs on this rank, and the bytes that they count."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for nodes in TOPOLOGIES:
        claim = NodeClaim("test", nodes=nodes)
        specs = [LinkSpec("net", None, "gloo"), LinkSpec(INSIDE, "lo", "gloo")]
        cluster = connect(specs, HOST, CPU(), 30.0, claim)
        cluster.open([vote_channel("net"), INSIDE])
        found.append(results(cluster, rank))
        found[-1]["measuring"] = [cluster.probe_group(name).size() for name in ("net", INSIDE)]
        links = dict(cluster.links)
        cluster.open([INSIDE], {INSIDE: tuple((replica,) for replica in range(len(nodes)))})
        found[-1]["kept"] = cluster.links == links
        cluster.close()
    return found


def results(cluster: Cluster, rank: int) -> dict[str, Any]:
    act, inside = cluster.links["net"].collectives, cluster.links[INSIDE].collectives
    done: dict[str, Any] = {"averages": [], "halves": [], "copies": [], "inside": [], "bytes": []}
    for size in SIZES:
        whole, halves, copied, own = (values(rank, size) for _ in range(4))
        act.by_verb["all_reduce"](whole)
        act.by_verb["reduce_scatter"](halves)
        act.by_verb["all_gather"](halves)
        act.by_verb["broadcast"](copied)
        inside.by_verb["all_reduce"](own)
        for name, result in zip(done, (whole, halves, copied, own), strict=False):
            done[name].append(result.numpy())
        done["bytes"].append(act.sent_bytes("all_reduce", 8 * size))
    done["voters"] = cluster.groups[vote_channel("net")].size()
    done["everyone"] = cluster.everyone.size()
    done["place"] = cluster.replica, cluster.member, act.size
    return done


@cache
def found() -> list[list[dict[str, Any]]]:
    return run_ranks(RANKS, use_links)


@pytest.mark.parametrize("i", range(len(TOPOLOGIES)), ids=lambda i: str(TOPOLOGIES[i]))
def test_every_verb(i: int) -> None:
    nodes, ranks = TOPOLOGIES[i], [by_topology[i] for by_topology in found()]
    for n, size in enumerate(SIZES):
        given = [values(rank, size).numpy() for rank in range(RANKS)]
        mean = np.mean(given, axis=0)
        for node in nodes:
            here = np.mean([given[rank] for rank in node], axis=0)
            for rank in node:
                one = ranks[rank]
                np.testing.assert_allclose(one["averages"][n], mean, rtol=0, atol=1e-12)
                np.testing.assert_allclose(one["halves"][n], mean, rtol=0, atol=1e-12)
                np.testing.assert_array_equal(one["copies"][n], given[0])
                np.testing.assert_allclose(one["inside"][n], here, rtol=0, atol=1e-12)
                first = ranks[node[0]]["averages"][n]
                np.testing.assert_array_equal(one["averages"][n], first)  # equal bits in a node


@pytest.mark.parametrize("i", range(len(TOPOLOGIES)), ids=lambda i: str(TOPOLOGIES[i]))
def test_a_node_counts_a_message_once(i: int) -> None:
    """Up to one element, because shards have whole elements and bytes are divided evenly."""
    ranks = [by_topology[i] for by_topology in found()]
    for n, size in enumerate(SIZES):
        for node in TOPOLOGIES[i]:
            counted = sum(ranks[rank]["bytes"][n] for rank in node)
            assert counted == 8 * size


@pytest.mark.parametrize("i", range(len(TOPOLOGIES)), ids=lambda i: str(TOPOLOGIES[i]))
def test_groups(i: int) -> None:
    topology = Topology(tuple(tuple(sorted(node)) for node in TOPOLOGIES[i]))
    for rank, by_topology in enumerate(found()):
        one = by_topology[i]
        assert (one["voters"], one["everyone"]) == (RANKS, RANKS)
        assert one["measuring"] == [RANKS, RANKS], "columns and nodes send at the same time"
        assert one["kept"], "nodes and columns are the groups of every plan"
        *place, column = one["place"]
        assert place == [topology.replica_of(rank), topology.member_of(rank)]
        if topology.column_of(rank) is not None:
            assert column == topology.replicas


def use_native_halves() -> list[tuple[bytes, bytes]]:
    """Halves for NCCL with fewer owners than ranks, on gloo."""
    dist.init_process_group("gloo")
    halves, done = Native(new_group("gloo", 30.0), owners=2), []
    for size in SIZES:
        x = values(dist.get_rank(), size)
        halves.reduce_scatter(x)
        own = x[: -(-size // 2)] if dist.get_rank() == 0 else x[-(-size // 2) :]
        kept = own.numpy().tobytes() if dist.get_rank() < 2 else b""
        halves.all_gather(x)
        done.append((kept, x.numpy().tobytes()))
    return done


def test_native_halves_with_fewer_owners() -> None:
    ranks = run_ranks(3, use_native_halves)
    for n, size in enumerate(SIZES):
        mean = np.mean([values(rank, size).numpy() for rank in range(3)], axis=0)
        whole = np.frombuffer(ranks[0][n][1])
        np.testing.assert_allclose(whole, mean, rtol=0, atol=1e-12)
        assert [rank[n][1] for rank in ranks] == [ranks[0][n][1]] * 3
        assert ranks[0][n][0] + ranks[1][n][0] == ranks[0][n][1]


PAIRS, HALF = ((0, 1), (2, 3)), 4  # nodes, and elements of a shard of each rank
KEPT = 0.25  # error of earlier messages
INT8 = codec("int8", {})


def send_codes() -> tuple[list[tuple[list[int], Any]], int]:
    """Bad ranks and errors after a message in which rank 1 has a NaN, and after one whose values
    are too large for codes; bytes that a link counts for a message."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    specs = [LinkSpec("net", None, "gloo"), LinkSpec(INSIDE, "lo", "gloo")]
    cluster = connect(specs, HOST, CPU(), 30.0, NodeClaim("test", nodes=PAIRS))
    cluster.open([vote_channel("net"), INSIDE])
    link: Any = cluster.links["net"]
    grad, step = Moment("grad"), Moment("step")
    sent = transfer("grad", range(1), after=grad, before=step, phases=[0], link="net")

    def encoded(x: Tensor, error: Tensor) -> CodedMessage:
        how = Settings(INT8, "gather", 0, keeps=True)
        return CodedMessage(sent, [Part(x, x[:0].clone(), {})], [([error], [])], how)

    spoilt = values(rank, 2 * HALF)
    if rank == 1:
        spoilt[0] = torch.nan
    large = torch.full((2 * HALF,), 1e300, dtype=torch.float64)
    for x in (spoilt, large):
        error = torch.full_like(x, KEPT)
        encoded(x, error)(message := Message(sent, 0, 0), link.collectives)
        found.append((list(message.culprits), error.numpy()))
    x = values(rank, 2 * HALF)
    message = Message(sent, 0, 0, coded=encoded(x, torch.zeros_like(x)))
    link._send(message)
    assert cluster.close()
    return found, message.coded_bytes


@cache
def coded() -> list[tuple[list[tuple[list[int], Any]], int]]:
    return run_ranks(4, send_codes)


def test_a_bad_message_names_its_ranks_and_leaves_errors() -> None:
    """Finite values that codes cannot hold name all ranks."""
    for found, _ in coded():
        assert [bad for bad, _ in found] == [[1], [0, 1, 2, 3]]
        assert all((error == KEPT).all() for _, error in found)


def test_a_message_of_codes_counts_the_shards_of_its_node() -> None:
    each = equivalent_bytes(INT8, "gather", HALF, 8, 0, 2)
    assert [count for _, count in coded()] == [2 * each] * 4
