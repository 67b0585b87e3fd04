"""Search for the graph with the fastest consensus on measured links."""

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

MOST_WORK = 1e9  # largest work of a search, in evaluations x workers^3; about ten seconds
AT_ONCE = 64  # graphs per evaluation
THRESHOLDS = 12  # initial graphs without slow pairs

Matrix = NDArray[np.float64]
Graphs = NDArray[np.bool_]  # adjacency matrices: graph, worker, worker


@dataclass(frozen=True)
class Measured:
    """Result of a search.

    Attributes:
        graph: graph of the workers.
        rates_per_s: exchanges per second of each edge.
        decay_per_s: approximate decay rate of the squared consensus distance: 1 / sqrt(chi1 * chi2)
            with momentum, lambda_2 without.
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
    """Return the graph and the rates with the fastest consensus per second.

    A worker exchanges with one other worker at a time, both directions at once. An exchange takes
    the delay plus the bytes divided by the rate of the slower direction. Either all edges are used
    in the proportions of `edge_rates`, or slow edges less often, whichever is faster. The search
    improves several initial graphs. For up to five workers it finds the optimum in tests.

    Args:
        pair_rate_bytes_s: bytes per second from row to column, [N, N]; 0 for an unreachable pair.
        pair_delay_s: seconds of delay from row to column, [N, N].
        message_bytes: bytes of an exchange in each direction.
        most_per_s: limit of the exchanges of a worker per second.
        busy: limit of the share of time that a worker spends in exchanges.
        momentum: whether to optimize for A2CiD2; otherwise for AD-PSGD.
        even: whether only the proportions of `edge_rates` are permitted.
        seed: seed of the search.

    Raises:
        ValueError: a value is out of range, or the pairs do not connect all workers.
    """
    rate, delay = (
        _matrix("pair_rate_bytes_s", pair_rate_bytes_s),
        _matrix("pair_delay_s", pair_delay_s),
    )
    _check(rate, delay, message_bytes, most_per_s, busy)
    with np.errstate(divide="ignore"):
        seconds = np.maximum(delay, delay.T) + message_bytes / np.minimum(rate, rate.T)
    results: list[tuple[float, NDArray[np.bool_], Matrix]] = []
    for alike in (True,) if even else (True, False):
        search = _Search(seconds, most_per_s, busy, momentum, alike)
        one, decay = search.climb(search.starts(), np.random.default_rng(seed))
        results.append((decay, one, search.rates(one[None])[0]))
    decay, best, rates = max(results, key=lambda one: one[0])
    edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(best))]
    graph = nx.Graph(edges)
    return Measured(graph, {edge: float(rates[edge]) for edge in edges}, decay)


class _Search:
    """Search state: rates and decay of graphs, initial graphs, and improvements of a graph."""

    def __init__(
        self, seconds: Matrix, most_per_s: float, busy: float, momentum: bool, even: bool
    ) -> None:
        self.n, self.even = len(seconds), even
        self.seconds, self.momentum = seconds, momentum
        self.most_per_s, self.busy = most_per_s, busy
        with np.errstate(divide="ignore"):
            # rate of an edge that is the only edge of both ends
            self.alone = np.minimum(busy / seconds, most_per_s)
        self.usable = np.isfinite(seconds) & ~np.eye(self.n, dtype=bool)
        self.left = int(max(MOST_WORK / self.n**3, AT_ONCE))

    def rates(self, graphs: Graphs) -> Matrix:
        """Return the highest exchange rates per second, [graphs, N, N].

        With `even` the rates have the proportions of `edge_rates`. Otherwise each worker divides
        its time equally among its edges, and the end with less time determines the rate of an edge.
        """
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
        """Return the decay of the squared consensus distance per second, [graphs]; 0 for a
        partitioned graph.
        """
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

    def starts(self) -> Graphs:
        """Return initial graphs: all pairs, fast pairs, and the fastest tree, ring, torus, star and
        exponential graph.
        """
        pairs = np.sort(self.seconds[np.triu(self.usable)])
        limits = {pairs[int(k)] for k in np.linspace(0, len(pairs) - 1, THRESHOLDS)}
        graphs = [self.usable & (self.seconds <= limit) for limit in sorted(limits)]
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
        order = self._nearest_order()
        exponential = topology("exponential", self.n)
        spread = self._adjacency((order[i], order[j]) for i, j in exponential.edges)
        ring = self._adjacency(zip(order, [*order[1:], order[0]], strict=True))
        shapes = [star, spread, ring]
        with suppress(ValueError):  # a torus is impossible for some numbers of workers
            torus = topology("torus", self.n)
            shapes.append(self._adjacency((order[i], order[j]) for i, j in torus.edges))
        whole = [nx.is_connected(nx.from_numpy_array(shape)) for shape in shapes]
        graphs += [one if ok else one | tree for one, ok in zip(shapes, whole, strict=True)]
        return np.array([*graphs, tree])

    def _nearest_order(self) -> list[int]:
        """Return all workers in nearest-neighbour order: each is followed by the fastest remaining
        one.
        """
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

    def climb(self, starts: Graphs, rng: np.random.Generator) -> tuple[NDArray[np.bool_], float]:
        """Improve the three best initial graphs. Return the best result and its decay."""
        decays = self.decays(starts)
        best = starts[int(decays.argmax())], float(decays.max())
        for place in np.argsort(-decays, kind="stable")[:3]:
            found = self._climb(starts[place], float(decays[place]), rng)
            if found[1] > best[1]:
                best = found
        return best

    def _climb(
        self, graph: NDArray[np.bool_], decay: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.bool_], float]:
        """Move to better neighbouring graphs until there is none or the work limit is reached."""
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
        """Yield graphs with one edge more or less, then graphs in which one end of an edge is
        moved.
        """
        pairs = np.argwhere(np.triu(self.usable))
        rng.shuffle(pairs)
        for i, j in pairs.tolist():
            yield _toggle_edges(graph, (i, j))
        for i, j in pairs[graph[pairs[:, 0], pairs[:, 1]]].tolist():
            for stays, moves in ((i, j), (j, i)):
                for to in np.flatnonzero(self.usable[stays] & ~graph[stays]).tolist():
                    yield _toggle_edges(graph, (stays, moves), (stays, to))


def _toggle_edges(graph: NDArray[np.bool_], *edges: Edge) -> NDArray[np.bool_]:
    other = graph.copy()
    for i, j in edges:
        other[i, j] = other[j, i] = not graph[i, j]
    return other


def _matrix(name: str, values: ArrayLike) -> Matrix:
    """Return the values as a matrix with ones on the diagonal.

    Raises:
        ValueError: the values are not square, or negative.
    """
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
