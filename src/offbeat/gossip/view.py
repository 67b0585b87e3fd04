"""View of the graph: edges and workers of the job, as far as one worker has received them.

Each edge has a version and a state. A worker that detects a change of an edge sends it to its
neighbours, which forward it. The newer version replaces the older one; of equal versions, the worse
state does. All connected workers therefore reach the same view, independent of the order of
messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import networkx as nx

from offbeat.gossip.graphs import Edge, parts


class State(IntEnum):
    """State of an edge."""

    UP = 0
    DOWN = 1  # disconnected, possibly only for a moment
    GONE = 2  # disconnected for longer than `silent_s`
    LEFT = 3  # one end has left the job


Known = tuple[int, int, int, int, float]  # smaller id, larger id, version, state, label


@dataclass(frozen=True)
class Place:
    """Place of a worker in the tree of a reduction.

    Attributes:
        parent: parent in the tree; None for the root.
        children: children in the tree.
        digest: digest of the view from which the tree is built.
        members: number of workers in the tree.
    """

    parent: int | None
    children: tuple[int, ...]
    digest: int
    members: int


class View:
    """View of the graph of worker `me`.

    Attributes:
        me: id of this worker.
        first: initial edges of the job, sorted.
    """

    def __init__(self, me: int, edges: Iterable[Edge]):
        self.me, self.first = me, sorted(_edge(*edge) for edge in edges)
        new = 0, State.UP, 0.0
        self._edges: dict[Edge, tuple[int, State, float]] = dict.fromkeys(self.first, new)
        self._cached_edges: dict[State, list[Edge]] = {}

    # ---- state of the view ------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        """Return all workers that have ever been in the view."""
        return sorted({end for edge in self._edges for end in edge} | {self.me})

    def neighbours_of(self, worker: int) -> list[int]:
        """Return all workers that have ever had an edge to `worker`, connected or not."""
        return sorted(sum(edge) - worker for edge in self._edges if worker in edge)

    def edges(self, worst: State = State.DOWN) -> list[Edge]:
        """Return the edges whose state is `worst` or better, sorted."""
        if worst not in self._cached_edges:
            found = sorted(edge for edge, (_, state, _) in self._edges.items() if state <= worst)
            self._cached_edges[worst] = found
        return self._cached_edges[worst]

    def state(self, peer: int) -> State:
        """Return the state of the edge between this worker and a neighbour."""
        return self._edges[_edge(self.me, peer)][1]

    def members(self) -> list[int]:
        """Return this worker and all workers with an edge that is UP or DOWN."""
        return sorted({end for edge in self.edges() for end in edge} | {self.me})

    def parts(self) -> list[list[int]]:
        """Return the connected parts of the members, the largest first; of equal ones, that with
        the smallest id.
        """
        graph = nx.Graph(self.edges())
        graph.add_node(self.me)
        return [[*part] for part in parts(graph)]

    def is_surviving_majority(self, part: Sequence[int]) -> bool:
        """Return whether a part contains most members, and each other member has lost an edge to
        it.

        All other members have then probably failed. Nothing is known of a worker without such an
        edge.
        """
        members, mine = self.members(), set(part)
        near = {end for edge in self._edges if set(edge) & mine for end in edge}
        return 2 * len(mine) > len(members) and set(members) <= near

    def dead_workers(self) -> list[int]:
        """Return the failed workers: former members that have not left.

        A worker has left if one of its edges to members is LEFT. If only edges to former members
        are LEFT, the worker has left unless one of its edges to members is GONE.
        """
        members = {*self.members()}
        dead = []
        for worker in {*self.workers} - members:
            edges = [
                (state, sum(edge) - worker in members)
                for edge, (_, state, _) in self._edges.items()
                if worker in edge
            ]
            lost = (State.GONE, True) in edges
            has_left = (State.LEFT, True) in edges or ((State.LEFT, False) in edges and not lost)
            dead += [] if has_left else [worker]
        return sorted(dead)

    def has_leavers(self) -> bool:
        """Return whether any worker has left the job."""
        return any(state is State.LEFT for _, state, _ in self._edges.values())

    def has_lost_connection(self) -> bool:
        """Return whether lost workers or edges alone separate the members.

        Workers that have left separate the members of a ring at the end of a job without any loss.
        """
        kept = [edge for edge, (_, state, _) in self._edges.items() if state is not State.GONE]
        return not {*self.members()} <= {*self._spanning_tree(self.me, kept)}

    def place(self) -> Place | None:
        """Return the place of this worker in the tree over all members; None while they are not
        connected.
        """
        members, up = self.members(), self.edges(State.UP)
        parents = self._spanning_tree(members[0], up)
        if len(parents) < len(members):
            return None
        children = tuple(w for w, parent in parents.items() if parent == self.me)
        return Place(parents[self.me], children, self.digest, len(members))

    @property
    def label(self) -> float:
        """Return the label of the last change, which is equal for equal views."""
        return max((label for _, _, label in self._edges.values()), default=0.0)

    @property
    def digest(self) -> int:
        """Return a checksum of the view."""
        text = repr(sorted(self._edges.items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    # ---- changes ----------------------------------------------------------------------------

    def set_edge(
        self, peer: int, state: State, label: float = 0.0, *, again: bool = False
    ) -> list[Known]:
        """Set the state of an edge of this worker. Return the changes to send to the neighbours.

        Args:
            peer: neighbour at the other end of the edge.
            state: new state of the edge.
            label: label of the change.
            again: whether to create a new version even if the state is unchanged.
        """
        edge = _edge(self.me, peer)
        version, before, _ = self._edges[edge]
        if state is before and not again:
            return []
        self._store_edge(edge, version + 1, state, label)
        return [(*edge, version + 1, int(state), label)]

    def add_worker(self, worker: int, around: Sequence[int]) -> list[Known]:
        """Add a joining worker with edges to its neighbours. Return the changes to send.

        The edges are GONE until the worker connects, so that no worker waits for it.
        """
        edges = [_edge(worker, peer) for peer in around]
        first = 1, State.GONE, 0.0
        return self.merge([(*edge, *first) for edge in edges if edge not in self._edges])

    def cut_off(self, part: Sequence[int]) -> list[Known]:
        """Mark all edges outside of a part as GONE. Return the changes to send."""
        new: list[Known] = []
        for (i, j), (version, state, label) in list(self._edges.items()):
            if state <= State.DOWN and i not in part:
                self._store_edge((i, j), version + 1, State.GONE, label)
                new.append((i, j, version + 1, int(State.GONE), label))
        return new

    def changed_edges(self) -> list[Known]:
        """Return all edges that differ from the initial view."""
        edges = self._edges.items()
        return [(*edge, v, int(state), label) for edge, (v, state, label) in edges if v]

    def merge(self, told: Sequence[Sequence[Any]]) -> list[Known]:
        """Merge the edges received from a neighbour. Return the edges that were new or newer.

        Raises:
            ValueError: an edge is invalid. No edge is merged then.
        """
        new: list[Known] = []
        for edge, now in [_parse_known(one) for one in told]:
            if now > self._edges.get(edge, (0, State.UP, 0.0)):
                self._store_edge(edge, *now)
                version, state, label = now
                new.append((*edge, version, int(state), label))
        return new

    def _store_edge(self, edge: Edge, version: int, state: State, label: float) -> None:
        self._edges[edge] = version, state, label
        self._cached_edges.clear()

    def _spanning_tree(self, root: int, edges: Iterable[Edge]) -> dict[int, int | None]:
        """Return the parent of each worker that the root reaches, in breadth-first order."""
        graph = nx.Graph(edges)
        graph.add_node(root)
        return {root: None, **dict(nx.bfs_predecessors(graph, root, sort_neighbors=sorted))}


def _parse_known(known: Sequence[Any]) -> tuple[Edge, tuple[int, State, float]]:
    """Return an edge of a neighbour's view, and its version, state and label."""
    i, j, version, state, label = known
    whole = type(i) is type(j) is type(version) is int and isinstance(label, (int, float))
    if not (whole and 0 <= i < j):
        raise ValueError(f"edge ({i}-{j}), version {version}, label {label!r}, cannot be")
    return (i, j), (version, State(state), label)


def _edge(i: int, j: int) -> Edge:
    return min(i, j), max(i, j)
