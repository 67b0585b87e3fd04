"""Topology: which ranks hold which replica, and which ranks average with each other.

A replica is a whole copy of the model. Its ranks form a node: they share the replica, each with a
part of it (a sharded node) or with all of it (a replicated node). Ranks of equal index in all nodes
form a column; they hold the same part of the model, and average it over the links between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from offbeat.core.plan import Groups

if TYPE_CHECKING:
    from offbeat.core.transport.agreement import Agreement

AUTO = "auto"
DIMENSIONS = (
    "init_device_mesh(device, (nodes, ranks_per_node), mesh_dim_names=('between', 'inside'))"
)
NO_MESH = (
    "the model is sharded over several ranks, so mesh (None) must be given: the dimension of the "
    "device mesh between nodes, as in mesh=mesh['between']"
)
Nodes = Literal["auto"] | int | Sequence[Sequence[int]]
"""Nodes of a job: "auto", the number of ranks of each, or the ranks of each."""


@dataclass(frozen=True)
class Topology:
    """Assignment of the ranks of a job to replicas.

    Attributes:
        nodes: ranks of each replica, in the order of their members (ascending in replicated nodes);
            each rank of the job once.
        sharded: whether each rank holds a part of its replica; otherwise it holds all of it.
        source: setting that states the nodes, for messages.
    """

    nodes: Groups
    sharded: bool = False
    source: str = field(default="", compare=False)

    @classmethod
    def flat(cls, ranks: int) -> Topology:
        """Return the topology of a job in which every rank holds a replica of its own."""
        return cls(tuple((rank,) for rank in range(ranks)))

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Topology | None:
        """Return the nodes in data of `record`; None if every rank holds a replica of its own."""
        if not data.get("nodes"):
            return None
        return cls(tuple(map(tuple, data["nodes"])), bool(data.get("sharded")))

    def record(self) -> dict[str, Any]:
        """Return the nodes as JSON types; nothing if every rank holds a replica of its own."""
        if self.is_flat:
            return {}
        return {"nodes": [*map(list, self.nodes)], "sharded": self.sharded}

    @cached_property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return sum(self.sizes)

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return len(self.nodes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of ranks of each node."""
        return tuple(map(len, self.nodes))

    @cached_property
    def is_flat(self) -> bool:
        """Whether every rank holds a replica of its own."""
        return max(self.sizes) == 1

    @property
    def is_even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len(set(self.sizes)) == 1

    @cached_property
    def columns(self) -> Groups:
        """Return the ranks of equal member in all nodes, by replica.

        There are as many columns as the smallest node has ranks. Further ranks of larger nodes are
        in no column.
        """
        return tuple(
            tuple(node[member] for node in self.nodes) for member in range(min(self.sizes))
        )

    @property
    def holders(self) -> Groups:
        """Return the groups of ranks that hold the same part of the model, if it is sharded;
        otherwise (), because all ranks hold all of it."""
        return self.columns if self.sharded else ()

    @property
    def outside(self) -> tuple[int, ...]:
        """Return the ranks that are in no column."""
        return tuple(rank for node in self.nodes for rank in node[min(self.sizes) :])

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Return the replica of each rank, and the index of the rank within its node."""
        return {
            rank: (replica, member)
            for replica, node in enumerate(self.nodes)
            for member, rank in enumerate(node)
        }

    def replica_of(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to."""
        return self._places[rank][0]

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's node."""
        return self.nodes[self.replica_of(rank)]

    def member_of(self, rank: int) -> int:
        """Return the index of a rank within its node."""
        return self._places[rank][1]

    def column_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks of a rank's column; None if it is in none."""
        member = self.member_of(rank)
        return self.columns[member] if member < len(self.columns) else None

    def ring_share(self, rank: int) -> float:
        """Return the bytes that a rank sends between nodes in an all-reduce over all ranks in a
        ring, relative to what one rank per replica would send.

        In a ring of N ranks each of them sends `2 (N - 1) / N` of a message to the next one, and
        only a rank whose next one is in another node sends between nodes.
        """
        following = (rank + 1) % self.ranks
        if self.is_flat:
            return 1.0
        if following in self.node_of(rank):
            return 0.0
        return (1 - 1 / self.ranks) / (1 - 1 / self.replicas)

    def weight_of(self, replica: int) -> float:
        """Return the weight of a replica in averages, relative to equal weights: its share of the
        ranks times the number of replicas."""
        return self.sizes[replica] * self.replicas / self.ranks

    def __str__(self) -> str:
        sizes = [str(size) for size in self.sizes]
        each = sizes[0] if self.is_even else f"{', '.join(sizes[:-1])} and {sizes[-1]}"
        plural = "s" if self.replicas > 1 else ""
        return f"{self.replicas} node{plural} of {each} ranks"

    def describe(self) -> str:
        """Return a text that differs between any two topologies with nodes of several ranks."""
        in_order = [rank for node in self.nodes for rank in node] == [*range(self.ranks)]
        which = "" if in_order else f" ({_node_texts(self.nodes)})"
        return f"{self}{which} that {'shard' if self.sharded else 'replicate'} the model"


@dataclass(frozen=True)
class NodeClaim:
    """Nodes of a job as one rank states them.

    Attributes:
        source: setting that states it, such as "nodes='auto'".
        node: ranks of this rank's node, in the order of their members.
        column: ranks of this rank's column, by replica; None if not stated.
        nodes: all nodes; None if not stated.
        sharded: whether this rank holds a part of its replica.
        problem: reason why this rank's settings cannot be used; None without one.
    """

    source: str
    node: tuple[int, ...] = ()
    column: tuple[int, ...] | None = None
    nodes: Groups | None = None
    sharded: bool = False
    problem: str | None = None


def claim_topology(
    mesh: Any,
    nodes: Any,
    shards: Sequence[int] | None,
    rank: int,
    world_size: int,
    environ: Mapping[str, str],
) -> NodeClaim:
    """Return the nodes that the arguments of `prepare` state on one rank.

    Args:
        mesh: device mesh of one dimension (the ranks that average with each other) or two
            (between nodes, inside a node); None without one.
        nodes: "auto", a number of ranks per node, or the ranks of each node; None without nodes.
        shards: ranks that share this rank's replica, if the model is sharded; otherwise None.
        rank: rank of this process.
        world_size: number of ranks.
        environ: environment variables; "auto" reads LOCAL_WORLD_SIZE and LOCAL_RANK.
    """
    if mesh is not None and nodes is not None:
        return NodeClaim("mesh", problem=f"nodes ({nodes!r}) must be left out where mesh is given")
    if mesh is not None:
        return _claim_mesh(mesh, shards, rank, world_size)
    if nodes is None:
        return NodeClaim("", node=(rank,), problem=None if shards is None else NO_MESH)
    claim = _claim_nodes(nodes, rank, world_size, environ)
    if shards is None or claim.problem is not None:
        return claim
    node = claim.node or next((n for n in claim.nodes or () if rank in n), ())
    if node != tuple(shards):
        problem = (
            f"{claim.source} must be the ranks that share a replica: the model is sharded over "
            f"ranks {_numbers(shards)}, not {_numbers(node)}"
        )
        return replace(claim, problem=problem)
    return replace(claim, sharded=True)


def _claim_mesh(mesh: Any, shards: Sequence[int] | None, rank: int, world_size: int) -> NodeClaim:
    ranks = mesh.mesh.tolist()
    if mesh.ndim == 2:
        source = f"mesh ({len(ranks)} x {len(ranks[0])} ranks)"
        problem = None
        if shards is not None:
            problem = (
                f"{source} must have one dimension where the model is sharded: the one between "
                "nodes, as in mesh['between']; the other one belongs to fully_shard"
            )
        return NodeClaim(source, nodes=tuple(map(tuple, ranks)), problem=problem)
    source = f"mesh ({mesh.ndim} dimensions)"
    if mesh.ndim > 2:
        return NodeClaim(source, problem=f"{source} must have one dimension or two: {DIMENSIONS}")
    source = f"mesh (ranks {_numbers(ranks)})"
    column = tuple(ranks)
    if shards is not None:
        shared = sorted({*shards} & {*column} - {rank})
        problem = None
        if shared:
            problem = (
                f"{source} must not hold ranks {_numbers(shared)}, over which the parameters are "
                "sharded or replicated already (HSDP averages gradients itself); give fully_shard "
                "the dimension inside a node, and prepare the one between nodes"
            )
        return NodeClaim(source, tuple(shards), column, sharded=True, problem=problem)
    if len(column) == world_size:
        return NodeClaim(source, node=(rank,), column=column)
    return NodeClaim(
        source,
        problem=f"{source} must have two dimensions where every rank holds the whole model: "
        f"{DIMENSIONS}",
    )


def _claim_nodes(nodes: Any, rank: int, world_size: int, environ: Mapping[str, str]) -> NodeClaim:
    source = f"nodes ({nodes!r})"
    if nodes == AUTO:
        size, local = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
        if not (size.isdecimal() and local.isdecimal() and int(local) < int(size)):
            problem = (
                f"{source} needs LOCAL_RANK ({local!r}) below LOCAL_WORLD_SIZE ({size!r}), which "
                "torchrun sets; give the number of ranks per node, as in nodes=4"
            )
            return NodeClaim(source, problem=problem)
        first = rank - int(local)
        return NodeClaim("LOCAL_WORLD_SIZE", node=tuple(range(first, first + int(size))))
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if nodes < 1 or world_size % nodes:
            problem = (
                f"{source} must divide the number of ranks ({world_size}); give the ranks of each "
                "node, as in nodes=[[0, 1], [2, 3, 4]]"
            )
            return NodeClaim(source, problem=problem)
        firsts = range(0, world_size, nodes)
        return NodeClaim(source, nodes=tuple(tuple(range(a, a + nodes)) for a in firsts))
    if not (isinstance(nodes, (list, tuple)) and all(_is_ranks(node) for node in nodes)):
        problem = (
            f"{source} must be 'auto', a number of ranks per node, or the ranks of each node, as "
            "in nodes=[[0, 1], [2, 3]]"
        )
        return NodeClaim(source, problem=problem)
    return NodeClaim(source, nodes=tuple(map(tuple, nodes)))


def _is_ranks(node: Any) -> bool:
    listed = isinstance(node, Sequence) and not isinstance(node, str)
    return listed and all(isinstance(one, int) and not isinstance(one, bool) for one in node)


def agree_on_topology(claim: NodeClaim, control: Agreement) -> Topology:
    """Return the topology that the ranks' claims state together.

    Raises:
        ValueError: on every rank, if a claim has a problem, if the nodes do not hold each rank
            once, if claims contradict each other, or if sharded nodes have unequal sizes.
    """
    return join_claims([NodeClaim(*fields) for fields in control.gather(astuple(claim))])


def join_claims(claims: Sequence[NodeClaim]) -> Topology:  # noqa: C901
    """Return the topology that the claims of all ranks state together, by rank; see
    `agree_on_topology`."""
    for rank, claim in enumerate(claims):
        if claim.problem is not None:
            raise ValueError(f"rank {rank}: {claim.problem}")
    first, world = claims[0], list(range(len(claims)))
    source = first.source
    for rank, claim in enumerate(claims):
        given = [(one.nodes, one.sharded, one.column is None) for one in (first, claim)]
        if given[0] != given[1]:
            raise ValueError(
                "the nodes must be the same on all ranks: rank 0 states "
                f"{_claim_text(first)}, rank {rank} {_claim_text(claim)}; call prepare with the "
                "same arguments everywhere"
            )
    if first.nodes is not None:
        nodes = first.nodes
    else:
        by_place = {(_place_of(rank, claim), claim.node) for rank, claim in enumerate(claims)}
        nodes = tuple(node for _, node in sorted(by_place))
    if sorted(rank for node in nodes for rank in node) != world or not all(nodes):
        raise ValueError(
            f"{source} must hold each of the ranks 0..{world[-1]} in one node, not "
            f"{_node_texts(nodes)}"
        )
    if all(len(node) == 1 for node in nodes):
        return Topology(tuple(sorted(nodes)), source=source)
    if not first.sharded:  # the order of members is free, and that of process groups ascends
        nodes = tuple(tuple(sorted(node)) for node in nodes)
    topology = Topology(nodes, first.sharded, source)
    if first.sharded and not topology.is_even:
        raise ValueError(
            f"{source}: sharded nodes must have equally many ranks, not "
            f"{_numbers(topology.sizes)}, because a rank averages its shard with an equal shard of "
            "every other node; give every node the same number of ranks, or replicate the model "
            "inside nodes"
        )
    for rank, claim in enumerate(claims):
        if claim.column is not None and claim.column != topology.column_of(rank):
            raise ValueError(
                f"{source}: rank {rank} must average with one rank of every node, in the same "
                f"place of each, not with {_numbers(claim.column)} beside the nodes "
                f"{_node_texts(nodes)}; give a dimension of the mesh that holds the shards"
            )
    return topology


def _place_of(rank: int, claim: NodeClaim) -> int:
    """Return a number that orders nodes: the index of the replica, or else the first rank."""
    if claim.column is not None:
        return claim.column.index(rank) if rank in claim.column else -1
    return min(claim.node)


def _claim_text(claim: NodeClaim) -> str:
    if not claim.source:
        return "no nodes"
    what = claim.source if claim.nodes is None else f"{claim.source}: {_node_texts(claim.nodes)}"
    return f"{what}, sharded" if claim.sharded else what


def _node_texts(nodes: Groups) -> str:
    return "; ".join(map(_numbers, nodes)) or "none"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
