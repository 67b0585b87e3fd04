"""The graph of gossip that measured links suit best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.gossip.graphs import Edge, topology

MOST_WORK = 1e9  # evaluations x workers^3 of a search; about ten seconds
AT_ONCE = 64  # graphs that are evaluated together
THRESHOLDS = 12  # graphs to begin with that leave out slow pairs

Matrix = NDArray[np.float64]
Graphs = NDArray[np.bool_]  # adjacency matrices: graph, worker, worker


@dataclass(frozen=True)
class Measured:
    """A graph, exchanges per second of its edges, and the decay that they promise.

    `decay_per_s` is 1 / sqrt(chi1 * chi2) with momentum and lambda_2 without: how fast the squared
    consensus distance falls, roughly.
    """

    graph: nx.Graph
    rates_per_s: dict[Edge, float]
    decay_per_s: float


def measured(
    pair_rate_bytes_s: ArrayLike,
    pair_delay_s: ArrayLike,
    message_bytes: float,
    *,
    most_per_s: float = math.inf,
    busy: float = 1.0,
    momentum: bool = True,
    even: bool = False,
    seed: int = 0,
) -> Measured:
    """The graph and the rates with which consensus comes about fastest per second.

    `pair_rate_bytes_s` and `pair_delay_s` are workers x workers, from row to column; a rate of 0
    is a pair that cannot reach each other. A worker exchanges with one other at a time, both ways
    at once, so an exchange takes the delay plus the bytes over the slower direction, and has both
    network cards to itself. Edges are used equally often (as `edge_rates` has it), or slow ones
    less often, whichever is better; with `even` only the former. `most_per_s` limits the exchanges
    of any worker, `busy` the share of time that it spends in them. The search climbs from several
    graphs; for up to five workers it finds the best one in tests.
    """
    rate, delay = (
        _matrix("pair_rate_bytes_s", pair_rate_bytes_s),
        _matrix("pair_delay_s", pair_delay_s),
    )
    _check(rate, delay, message_bytes, most_per_s, busy)
    with np.errstate(divide="ignore"):
        seconds = np.maximum(delay, delay.T) + message_bytes / np.minimum(rate, rate.T)
    found: list[tuple[float, NDArray[np.bool_], Matrix]] = []
    for alike in (True,) if even else (True, False):
        search = _Search(seconds, most_per_s, busy, momentum, alike)
        one, decay = search.climb(search.begins(), np.random.default_rng(seed))
        found.append((decay, one, search.rates(one[None])[0]))
    decay, best, rates = max(found, key=lambda one: one[0])
    edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(best))]
    graph = nx.Graph(edges)
    return Measured(graph, {edge: float(rates[edge]) for edge in edges}, decay)


class _Search:
    """Graphs of some workers, their rates, their decay, and better ones nearby."""

    def __init__(
        self, seconds: Matrix, most_per_s: float, busy: float, momentum: bool, even: bool
    ) -> None:
        self.n, self.even = len(seconds), even
        self.seconds, self.momentum = seconds, momentum
        self.most_per_s, self.busy = most_per_s, busy
        with np.errstate(divide="ignore"):
            self.alone = np.minimum(busy / seconds, most_per_s)  # rate of a worker's only edge
        self.usable = np.isfinite(seconds) & ~np.eye(self.n, dtype=bool)
        self.left = int(max(MOST_WORK / self.n**3, AT_ONCE))

    def rates(self, graphs: Graphs) -> Matrix:
        """Exchanges per second, as many as fit. `even`: in the proportions of `edge_rates`; else
        every worker divides its time equally, and the end with less time for an edge decides."""
        degree = np.maximum(graphs.sum(axis=2), 1)
        one, other = degree[:, :, None], degree[:, None, :]
        if self.even:
            rates = graphs / (one + other)
        else:
            rates = np.where(graphs, self.alone, 0.0) / np.maximum(one, other)
        spent = np.einsum("gij,ij->gi", rates, np.where(self.usable, self.seconds, 0.0))
        room = np.minimum(
            self.busy / np.maximum(spent.max(axis=1), 1e-300),
            self.most_per_s / np.maximum(rates.sum(axis=2).max(axis=1), 1e-300),
        )
        return rates * room[:, None, None]

    def decays(self, graphs: Graphs) -> Matrix:
        """Of the squared consensus distance per second; 0 where a graph falls apart."""
        self.left -= len(graphs)
        rates = self.rates(graphs)
        scale = rates.max(axis=(1, 2))
        laplacians = -rates / np.maximum(scale, 1e-300)[:, None, None]
        diagonal = np.arange(self.n)
        laplacians[:, diagonal, diagonal] = -laplacians.sum(axis=2)
        values, vectors = np.linalg.eigh(laplacians)
        least = values[:, 1]
        apart = least <= self.n * np.finfo(float).eps * values[:, -1]
        least = np.where(apart, 0.0, least)
        if not self.momentum:
            return least * scale
        weighted = vectors[:, :, 1:] / np.where(apart[:, None], 1.0, values[:, 1:])[:, None, :]
        inverse = np.einsum("gik,gjk->gij", weighted, vectors[:, :, 1:])
        own = inverse[:, diagonal, diagonal]
        resistance = own[:, :, None] + own[:, None, :] - 2 * inverse
        chi2 = 0.5 * np.where(graphs, resistance, 0.0).max(axis=(1, 2))
        return np.sqrt(least / np.where(apart, 1.0, chi2)) * scale

    def begins(self) -> Graphs:
        """All pairs; fast pairs only; the fastest tree, ring, torus; a star; few steps to all."""
        pairs = np.sort(self.seconds[np.triu(self.usable)])
        limits = {pairs[int(k)] for k in np.linspace(0, len(pairs) - 1, THRESHOLDS)}
        found = [self.usable & (self.seconds <= limit) for limit in sorted(limits)]
        complete = nx.Graph()
        for i, j in np.argwhere(np.triu(self.usable)):
            complete.add_edge(int(i), int(j), weight=self.seconds[i, j])
        if complete.number_of_nodes() < self.n or not nx.is_connected(complete):
            raise ValueError(
                "pair_rate_bytes_s must connect all workers, directly or over others; leave out "
                "workers that nobody can reach"
            )
        tree = self._adjacency(nx.minimum_spanning_tree(complete).edges)
        hub = int(np.where(self.usable, self.seconds, 0.0).sum(axis=1).argmin())
        star = self._adjacency((hub, other) for other in range(self.n) if other != hub)
        order = self._tour()
        exponential = topology("exponential", self.n)
        spread = self._adjacency((order[i], order[j]) for i, j in exponential.edges)
        ring = self._adjacency(zip(order, [*order[1:], order[0]], strict=True))
        shapes = [star, spread, ring]
        with suppress(ValueError):  # it does not fit every number of workers
            torus = topology("torus", self.n)
            shapes.append(self._adjacency((order[i], order[j]) for i, j in torus.edges))
        whole = [nx.is_connected(nx.from_numpy_array(shape)) for shape in shapes]
        found += [one if ok else one | tree for one, ok in zip(shapes, whole, strict=True)]
        return np.array([*found, tree])

    def _tour(self) -> list[int]:
        """All workers, each followed by the fastest one to reach that is left."""
        order = [0]
        while len(order) < self.n:
            left = [other for other in range(self.n) if other not in order]
            order.append(min(left, key=lambda other: self.seconds[order[-1], other]))
        return order

    def _adjacency(self, edges: Iterable[Sequence[int]]) -> NDArray[np.bool_]:
        found = np.zeros((self.n, self.n), dtype=bool)
        for i, j in edges:
            found[i, j] = found[j, i] = i != j
        return found & self.usable

    def climb(self, begins: Graphs, rng: np.random.Generator) -> tuple[NDArray[np.bool_], float]:
        """The best graph found from the three best to begin with, and its decay."""
        decays = self.decays(begins)
        best = begins[int(decays.argmax())], float(decays.max())
        for place in np.argsort(-decays, kind="stable")[:3]:
            found = self._climb(begins[place], float(decays[place]), rng)
            if found[1] > best[1]:
                best = found
        return best

    def _climb(
        self, graph: NDArray[np.bool_], decay: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.bool_], float]:
        """Take better neighbours until there is none, or no work is left."""
        better = True
        while better:
            better = False
            neighbours = self._neighbours(graph, rng)
            while self.left > 0 and (some := list(islice(neighbours, AT_ONCE))):
                decays = self.decays(np.array(some))
                if decays.max() > decay * (1 + 1e-9):
                    graph, decay = some[int(decays.argmax())], float(decays.max())
                    better = True
                    break
        return graph, decay

    def _neighbours(
        self, graph: NDArray[np.bool_], rng: np.random.Generator
    ) -> Iterator[NDArray[np.bool_]]:
        """Graphs with an edge more or less; then those in which one end of an edge has moved."""
        pairs = np.argwhere(np.triu(self.usable))
        rng.shuffle(pairs)
        for i, j in pairs.tolist():
            yield _toggled(graph, (i, j))
        for i, j in pairs[graph[pairs[:, 0], pairs[:, 1]]].tolist():
            for stays, moves in ((i, j), (j, i)):
                for to in np.flatnonzero(self.usable[stays] & ~graph[stays]).tolist():
                    yield _toggled(graph, (stays, moves), (stays, to))


def _toggled(graph: NDArray[np.bool_], *edges: Edge) -> NDArray[np.bool_]:
    other = graph.copy()
    for i, j in edges:
        other[i, j] = other[j, i] = not graph[i, j]
    return other


def _matrix(name: str, values: ArrayLike) -> Matrix:
    """Off its diagonal; ValueError unless square, with numbers of at least 0."""
    matrix = np.array(values, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(
            f"{name} (shape {matrix.shape}) must be workers x workers, at least 2 x 2; "
            "measure every pair"
        )
    np.fill_diagonal(matrix, 1.0)
    bad = np.argwhere(np.isnan(matrix) | (matrix < 0))
    if len(bad):
        i, j = bad[0]
        raise ValueError(
            f"{name}[{i}][{j}] ({matrix[i, j]:g}) must be at least 0; measure it again"
        )
    return matrix


def _check(
    rate: Matrix, delay: Matrix, message_bytes: float, most_per_s: float, busy: float
) -> None:
    if rate.shape != delay.shape:
        raise ValueError(
            f"pair_delay_s ({len(delay)} workers) must be of the same workers as "
            f"pair_rate_bytes_s ({len(rate)})"
        )
    if not (math.isfinite(message_bytes) and message_bytes > 0):
        raise ValueError(f"message_bytes ({message_bytes:g}) must be finite and more than 0")
    if not most_per_s > 0:
        raise ValueError(f"most_per_s ({most_per_s:g}) must be more than 0 exchanges per second")
    if not 0 < busy <= 1:
        raise ValueError(f"busy ({busy:g}) must be a share of time, more than 0 and at most 1")
    off = ~np.eye(len(rate), dtype=bool)
    free = off & np.isinf(rate) & (delay == 0)
    if free.any() and math.isinf(most_per_s):
        i, j = np.argwhere(free)[0]
        raise ValueError(
            f"pair_rate_bytes_s[{i}][{j}] (inf) must be finite where the delay is 0 and "
            "most_per_s has no limit; give most_per_s"
        )
