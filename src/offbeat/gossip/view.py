"""View: which edges and workers there are, as one worker knows it and hears of it.

Every edge has a version and a state. Who sees it change says so to its neighbours, and they to
theirs. The newer version counts, and of two equal ones the worse state. So all workers that hear
of each other come to the same view, in whatever order the words arrive.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Edge = tuple[int, int]  # the smaller id first


class State(IntEnum):
    """Of an edge."""

    UP = 0
    DOWN = 1  # broken, perhaps for a moment
    GONE = 2  # for longer than a worker may be silent
    LEFT = 3  # an end has said goodbye


Known = tuple[int, int, int, int, float]  # smaller id, larger id, version, state, label


@dataclass(frozen=True)
class Place:
    """A worker's place in the tree of a meeting."""

    parent: int | None
    children: tuple[int, ...]
    digest: int  # of the view that the tree is of
    members: int


class View:
    """What worker `me` knows of the graph with these edges."""

    def __init__(self, me: int, edges: Iterable[Edge]):
        self.me = me
        first = 0, State.UP, 0.0
        self._edges: dict[Edge, tuple[int, State, float]] = dict.fromkeys(sorted(edges), first)
        self._found: dict[State, list[Edge]] = {}

    # ---- what is known ----------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        """All that have ever been heard of."""
        return sorted({end for edge in self._edges for end in edge} | {self.me})

    def around(self, worker: int) -> list[int]:
        """Who has ever had an edge to a worker."""
        return sorted(sum(edge) - worker for edge in self._edges if worker in edge)

    def edges(self, worst: State = State.DOWN) -> list[Edge]:
        """Those that are in this state at worst, sorted."""
        if worst not in self._found:
            found = sorted(edge for edge, (_, state, _) in self._edges.items() if state <= worst)
            self._found[worst] = found
        return self._found[worst]

    def state(self, peer: int) -> State:
        """Of this worker's edge to a neighbour."""
        return self._edges[_edge(self.me, peer)][1]

    def members(self) -> list[int]:
        """Workers with an edge that is not gone, and this one."""
        return sorted({end for edge in self.edges() for end in edge} | {self.me})

    def parts(self) -> list[list[int]]:
        """Members that can reach each other, the largest part first; of equal ones the one with the
        smallest id."""
        found, left = [], set(self.members())
        while left:
            part = set(self._order(min(left), self.edges()))
            found.append(sorted(part))
            left -= part
        return sorted(found, key=lambda part: (-len(part), part))

    def alone(self, part: Sequence[int]) -> bool:
        """Whether these are most of the members, and each other member has lost an edge to them:
        then the others are as good as dead. Of a worker without such an edge nobody here can
        know."""
        members, mine = self.members(), set(part)
        near = {end for edge in self._edges if set(edge) & mine for end in edge}
        return 2 * len(mine) > len(members) and set(members) <= near

    def dead(self) -> list[int]:
        """Workers of which nobody has heard for too long."""
        members = self.members()
        left = [edge for edge, (_, state, _) in self._edges.items() if state is State.LEFT]
        said = {end for edge in left for end in edge}
        return [worker for worker in self.workers if worker not in members and worker not in said]

    def left(self) -> bool:
        """Whether somebody has said goodbye."""
        return any(state is State.LEFT for _, state, _ in self._edges.values())

    def has_lost_connection(self) -> bool:
        """Return whether lost workers or edges alone separate the members.

        Workers that have left separate the members of a ring at the end of a job without any loss.
        """
        kept = [edge for edge, (_, state, _) in self._edges.items() if state is not State.GONE]
        return not {*self.members()} <= {*self._order(self.me, kept)}

    def place(self) -> Place | None:
        """Where this worker is in the tree over all members; None while they do not hang
        together."""
        members, up = self.members(), self.edges(State.UP)
        parents = self._order(members[0], up)
        if len(parents) < len(members):
            return None
        children = tuple(w for w, parent in parents.items() if parent == self.me)
        return Place(parents[self.me], children, self.digest, len(members))

    @property
    def label(self) -> float:
        """Of the last change: with the same view everybody has the same."""
        return max((label for _, _, label in self._edges.values()), default=0.0)

    @property
    def digest(self) -> int:
        """Equal for equal views."""
        text = repr(sorted(self._edges.items()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    # ---- what changes -----------------------------------------------------------------------

    def change(
        self, peer: int, state: State, label: float = 0.0, *, again: bool = False
    ) -> list[Known]:
        """This worker's edge is in this state since this label, perhaps `again`; what to tell the
        neighbours."""
        edge = _edge(self.me, peer)
        version, before, _ = self._edges[edge]
        if state is before and not again:
            return []
        self._set(edge, version + 1, state, label)
        return [(*edge, version + 1, int(state), label)]

    def announce(self, worker: int, around: Sequence[int]) -> list[Known]:
        """This worker is about to come to these: what is new, and to be told to the neighbours.
        Until it is there its edges are gone, so that nobody waits."""
        edges = [_edge(worker, peer) for peer in around]
        first = 1, State.GONE, 0.0
        return self.merge([(*edge, *first) for edge in edges if edge not in self._edges])

    def cut_off(self, part: Sequence[int]) -> list[Known]:
        """Only these go on: every other edge is gone."""
        new: list[Known] = []
        for (i, j), (version, state, label) in list(self._edges.items()):
            if state <= State.DOWN and i not in part:
                self._set((i, j), version + 1, State.GONE, label)
                new.append((i, j, version + 1, int(State.GONE), label))
        return new

    def known(self) -> list[Known]:
        """Everything that has ever changed."""
        edges = self._edges.items()
        return [(*edge, v, int(state), label) for edge, (v, state, label) in edges if v]

    def merge(self, told: Sequence[Sequence[Any]]) -> list[Known]:
        """Take what a neighbour knows, new edges too; what of it is new. ValueError for what cannot
        be."""
        new: list[Known] = []
        for i, j, version, state, label in told:
            if not (type(i) is type(j) is type(version) is int and 0 <= i < j):
                raise ValueError(f"edge ({i}-{j}), version {version}, cannot be")
            here = self._edges.get((i, j), (0, State.UP, 0.0))
            if (version, State(state), label) > here:
                self._set((i, j), version, State(state), label)
                new.append((i, j, version, state, label))
        return new

    def _set(self, edge: Edge, version: int, state: State, label: float) -> None:
        self._edges[edge] = version, state, label
        self._found.clear()

    def _order(self, root: int, edges: Iterable[Edge]) -> dict[int, int | None]:
        """Workers that the root reaches, nearest first, with the one before them."""
        around: dict[int, list[int]] = {}
        for i, j in edges:
            around.setdefault(i, []).append(j)
            around.setdefault(j, []).append(i)
        parents: dict[int, int | None] = {root: None}
        todo = deque([root])
        while todo:
            here = todo.popleft()
            for other in sorted(around.get(here, [])):
                if other not in parents:
                    parents[other] = here
                    todo.append(other)
        return parents


def _edge(i: int, j: int) -> Edge:
    return min(i, j), max(i, j)
