"""Ranks of one member: a node that joins, leaves and fails as a whole."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.transport import rendezvous
from offbeat.core.transport.topology import AUTO, Topology

REMEDY = (
    "start each node alone, as in torchrun --standalone --nproc-per-node 2 train.py, and give "
    "nodes='auto'"
)


class MemberNode:
    """Ranks of this node, which form one member, and their store until they have joined a job.

    Args:
        rank: rank of this process in its node.
        size: number of ranks of the node.
        timeout_s: timeout of waits for the other ranks of the node, in seconds.

    Attributes:
        rank: rank of this process in its node.
        size: number of ranks of the node.

    Raises:
        RuntimeError: a rank of the node has not connected within the timeout.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout_s: float = 0.0):
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._exchanges = 0
        self._store: PrefixStore | None = None
        if size > 1:
            try:
                self._store = rendezvous.connect_store(rank, size, timeout_s)
            except TimeoutError as error:
                raise RuntimeError(f"{error} to rank {rank} of this node; {REMEDY}") from error

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the node, which JSON must support, by rank."""
        return self._exchange(value, range(self.size), self._timeout_s)

    def first(self, value: Any, more_s: float) -> Any:
        """Return the value of the first rank of the node.

        Args:
            value: value of this rank, which JSON must support.
            more_s: longest time in seconds for which the first rank may wait before its call,
                beyond the timeout.
        """
        return self._exchange(value, range(1), self._timeout_s + more_s)[0]

    def _exchange(self, value: Any, ranks: range, timeout_s: float) -> list[Any]:
        if self._store is None:
            return [value]
        number, self._exchanges = self._exchanges, self._exchanges + 1
        if self.rank in ranks:
            self._store.set(f"{number}/{self.rank}", json.dumps(value))
        found, end_s = list[Any](), time.monotonic() + timeout_s
        for rank in ranks:
            key, left_s = f"{number}/{rank}", max(end_s - time.monotonic(), 0.1)
            try:
                self._store.wait([key], timedelta(seconds=left_s))
                found.append(json.loads(self._store.get(key)))
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {rank} of this node has ended, or has not called offbeat.prepare within "
                    f"{timeout_s:g} s: {error}; {REMEDY}"
                ) from error
        return found


def node_of_process(nodes: Any, environ: Mapping[str, str], timeout_s: float) -> MemberNode:
    """Return the node of this process where members change.

    Args:
        nodes: "auto" for the ranks that a launcher has started on this host, their number, or None
            for members of one rank.
        environ: environment variables of the launcher.
        timeout_s: timeout of waits for the other ranks of the node, in seconds.

    Raises:
        ValueError: `nodes` is not the number of ranks that the launcher has started on this host,
            or the launcher has started other hosts, too.
    """
    if nodes is None:
        return MemberNode()
    is_number = isinstance(nodes, int) and not isinstance(nodes, bool)
    if nodes != AUTO and not (is_number and nodes >= 1):
        raise ValueError(
            f"nodes ({nodes!r}) must be 'auto' or the number of ranks of this node where members "
            f"change; {REMEDY}"
        )
    if nodes == 1:
        return MemberNode()
    size, rank = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ValueError(
            f"nodes ({nodes!r}) needs LOCAL_RANK ({rank!r}) below LOCAL_WORLD_SIZE ({size!r}), "
            f"which torchrun sets; {REMEDY}"
        )
    if nodes not in (AUTO, int(size)):
        raise ValueError(
            f"nodes ({nodes!r}) must be the number of ranks that the launcher has started on this "
            f"node (LOCAL_WORLD_SIZE {size}); give nodes='auto'"
        )
    world = environ.get("WORLD_SIZE", size)
    if int(size) > 1 and world != size:
        raise ValueError(
            f"WORLD_SIZE ({world}) must be LOCAL_WORLD_SIZE ({size}) where members change, because "
            f"a node that fails must not end others; {REMEDY}"
        )
    return MemberNode(int(rank), int(size), timeout_s)


def topology_of(sizes: Mapping[str, int], source: str) -> Topology:
    """Return the topology of an epoch.

    Args:
        sizes: numbers of ranks of its members, in their order.
        source: setting that states the nodes, for messages.
    """
    nodes, first = list[tuple[int, ...]](), 0
    for size in sizes.values():
        nodes.append(tuple(range(first, first + size)))
        first += size
    return Topology(tuple(nodes), source=source)


def rank_names(sizes: Mapping[str, int]) -> list[str]:
    """Return the names of all ranks of an epoch. That of a member of one rank is the member's."""
    return [
        name if size == 1 else f"{name}/{rank}"
        for name, size in sizes.items()
        for rank in range(size)
    ]


def member_of(rank_name: str) -> str:
    """Return the name of the member to which a rank belongs."""
    return rank_name.partition("/")[0]


def describe_rank(rank_name: str) -> str:
    """Return the words for a rank in messages."""
    name, _, rank = rank_name.partition("/")
    return f"member {name}" if not rank else f"rank {rank} of member {name}"
