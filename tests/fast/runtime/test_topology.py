"""Which ranks hold which replica: what ranks state, and what they agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.core.transport.topology import NodeClaim, Topology, claim_topology, join_claims

UNEVEN = Topology(((0, 1), (2, 3, 4)))


def agreed(
    world: int = 4,
    *,
    mesh: Any = None,
    nodes: Any = None,
    shards: Any = lambda _: None,
    environ: Any = lambda _: {},
) -> Topology:
    """Return what all ranks agree on; arguments that are functions differ between ranks."""

    def at(value: Any, rank: int) -> Any:
        return value(rank) if callable(value) else value

    claims = [
        claim_topology(
            at(mesh, rank), at(nodes, rank), shards(rank), rank, world, at(environ, rank)
        )
        for rank in range(world)
    ]
    return join_claims(claims)


def mesh_of(ranks: Any) -> SimpleNamespace:
    """Return what a DeviceMesh shows of its ranks."""
    grid = torch.tensor(ranks)
    return SimpleNamespace(mesh=grid, ndim=grid.ndim)


def local(size: int) -> Any:
    """Return torchrun's variables of a rank, for nodes of `size` ranks."""
    return lambda rank: {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % size)}


def column(rank: int) -> SimpleNamespace:
    return mesh_of([rank % 2, rank % 2 + 2])


def row(rank: int) -> list[int]:
    return [rank // 2 * 2, rank // 2 * 2 + 1]


PAIRS = Topology(((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("given", "topology"),
    [
        ({}, Topology.flat(4)),
        ({"nodes": 2}, PAIRS),
        ({"nodes": 1}, Topology.flat(4)),
        ({"nodes": "auto", "environ": local(2)}, PAIRS),
        ({"nodes": [[0, 1], [2, 3]]}, PAIRS),
        ({"nodes": [[3, 1], [0, 2]]}, Topology(((1, 3), (0, 2)))),
        ({"nodes": [[0, 1], [2, 3, 4]], "world": 5}, UNEVEN),
        ({"mesh": mesh_of([[0, 1], [2, 3]])}, PAIRS),
        ({"mesh": mesh_of([[0, 2], [1, 3]])}, Topology(((0, 2), (1, 3)))),
        ({"mesh": mesh_of([0, 1, 2, 3])}, Topology.flat(4)),
        ({"mesh": mesh_of([3, 1, 2, 0])}, Topology.flat(4)),
        ({"nodes": [[1], [0], [3], [2]]}, Topology.flat(4)),
        ({"mesh": column, "shards": row}, Topology(((0, 1), (2, 3)), sharded=True)),
        ({"nodes": 2, "shards": row}, Topology(((0, 1), (2, 3)), sharded=True)),
    ],
)
def test_what_ranks_agree_on(given: dict[str, Any], topology: Topology) -> None:
    assert agreed(**given) == topology


def test_nodes_of_unequal_size_by_the_launcher() -> None:
    def environ(rank: int) -> dict[str, str]:
        first, size = (0, 2) if rank < 2 else (2, 3)
        return {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank - first)}

    found = agreed(5, nodes="auto", environ=environ)
    assert found == UNEVEN
    assert found.source == "LOCAL_WORLD_SIZE"
    assert str(found) == "2 nodes of 2 and 3 ranks"


def test_places_of_ranks() -> None:
    assert UNEVEN.columns == ((0, 2), (1, 3))
    assert [UNEVEN.replica_of(rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    assert [UNEVEN.member_of(rank) for rank in range(5)] == [0, 1, 0, 1, 2]
    assert [UNEVEN.column_of(rank) for rank in range(5)] == [(0, 2), (1, 3), (0, 2), (1, 3), None]
    assert UNEVEN.outside == (4,)
    assert [UNEVEN.weight_of(0), UNEVEN.weight_of(1)] == [0.8, 1.2]
    assert (UNEVEN.ranks, UNEVEN.replicas, UNEVEN.is_even, UNEVEN.is_flat) == (5, 2, False, False)
    assert Topology.flat(3).is_flat
    assert Topology.flat(3).columns == ((0, 1, 2),)


@pytest.mark.parametrize(
    "topology", [Topology.flat(4), PAIRS, UNEVEN, Topology(((0, 2), (1, 3)))], ids=str
)
def test_bytes_of_a_ring_of_all_ranks_between_nodes(topology: Topology) -> None:
    """Each rank sends `2 (N - 1) / N` of a message to the next one, inside its node or not."""
    ranks, replicas = topology.ranks, topology.replicas
    for rank in range(ranks):
        crosses = topology.replica_of(rank) != topology.replica_of((rank + 1) % ranks)
        sent = 2 * (ranks - 1) / ranks if crosses else 0.0
        given = topology.ring_share(rank) * 2 * (replicas - 1) / replicas
        assert given == pytest.approx(sent)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 3}, r"nodes \(3\) must divide the number of ranks \(4\)"),
        ({"nodes": 0}, r"nodes \(0\) must divide"),
        ({"nodes": True}, r"nodes \(True\) must be 'auto', a number of ranks per node"),
        ({"nodes": "two"}, r"nodes \('two'\) must be 'auto', a number"),
        ({"nodes": [0, 1]}, r"nodes \(\[0, 1\]\) must be 'auto', a number"),
        ({"nodes": "auto"}, r"needs LOCAL_RANK \(''\) below LOCAL_WORLD_SIZE \(''\)"),
        ({"nodes": [[0, 1], [2]]}, "must hold each of the ranks 0..3 in one node, not 0, 1; 2"),
        ({"nodes": [[0, 1], [1, 2, 3]]}, "must hold each of the ranks 0..3 in one node"),
        ({"nodes": [[0, 1, 2, 3], []]}, "must hold each of the ranks 0..3 in one node"),
        ({"nodes": "auto", "environ": lambda rank: local(2 + rank // 3)(rank)}, "must hold each"),
        ({"mesh": mesh_of([0, 2]), "nodes": 2}, r"nodes \(2\) must be left out where mesh is"),
        ({"mesh": column}, "must have two dimensions where every rank holds the whole model"),
        ({"mesh": mesh_of([[[0, 1], [2, 3]]])}, r"mesh \(3 dimensions\) must have one dimension"),
        ({"mesh": mesh_of([[0, 1], [2, 3]]), "shards": row}, "must have one dimension where the"),
        ({"mesh": column, "shards": lambda _: [0, 1, 2, 3]}, "HSDP averages gradients itself"),
        ({"shards": row}, r"the model is sharded over several ranks, so mesh \(None\) must be"),
        ({"nodes": 2, "shards": lambda r: [r % 2, r % 2 + 2]}, "must be the ranks that share a"),
        ({"nodes": lambda rank: 2 if rank < 3 else 1}, "rank 0 states .*, rank 3 "),
        ({"nodes": lambda rank: 2 if rank else None}, "rank 0 states no nodes, rank 1 nodes"),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        agreed(**given)


def test_sharded_nodes_of_unequal_size_are_refused() -> None:
    node = [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4), (2, 3, 4)]
    claims = [NodeClaim("nodes ([..])", nodes=UNEVEN.nodes, node=n, sharded=True) for n in node]
    with pytest.raises(ValueError, match="sharded nodes must have equally many ranks, not 2, 3"):
        join_claims(claims)


def test_columns_must_cross_the_nodes_in_order() -> None:
    columns = [(0, 3), (1, 2), (1, 2), (0, 3)]
    claims = [NodeClaim("mesh", tuple(row(rank)), columns[rank], sharded=True) for rank in range(4)]
    with pytest.raises(ValueError, match="rank 0 must average with one rank of every node"):
        join_claims(claims)
