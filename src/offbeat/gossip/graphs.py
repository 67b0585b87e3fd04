"""Graphs of gossip: topologies, exchange rates of edges, and the constants that follow from the
rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import networkx as nx
import numpy as np
from numpy.typing import NDArray

Edge = tuple[int, int]  # the smaller rank first
Rates = Mapping[Edge, float]  # exchanges per unit time of each edge

MOST_DENSE = 512  # largest number of workers whose Laplacian is always a dense matrix
DEGREE = 4  # default degree of a random regular graph
MOST_TRIES = 100  # largest number of attempts to generate a connected random regular graph

# --- topologies ----------------------------------------------------------------------------------


def topology(name_or_edges: str | Iterable[Sequence[int]], n: int, *, seed: int = 0) -> nx.Graph:
    """Return a connected graph of the workers 0..n-1.

    Args:
        name_or_edges: complete, ring, star (worker 0 in the middle), exponential (i and i +- 2^k),
            torus, random-regular or random-regular:DEGREE; or edges as pairs or as text
            ("0-1,1-2").
        n: number of workers.
        seed: seed of a random regular graph.

    Raises:
        ValueError: the graph does not fit n workers, contains self loops, or is not connected.
    """
    if n < 2:
        raise ValueError(f"workers ({n}) must be at least 2; one alone has nobody to gossip with")
    if not isinstance(name_or_edges, str):
        graph = _graph_from_edges(name_or_edges)
    elif name_or_edges[:1].isdigit():
        graph = _graph_from_edges(_parse_pairs(name_or_edges))
    else:
        graph = _named_graph(name_or_edges, n, seed)
    graph.add_nodes_from(range(n))
    _check(graph, n)
    return graph


def _named_graph(text: str, n: int, seed: int) -> nx.Graph:
    name, colon, degree = text.partition(":")
    if name == "random-regular":
        return _random_regular(degree if colon else None, n, seed)
    if text not in NAMED:
        known = ", ".join([*NAMED, "random-regular[:DEGREE]"])
        measured = "; measured needs the links of a job" * (text == "measured")
        raise ValueError(
            f"topology ({text!r}) must be one of {known}, or edges as in 0-1,1-2{measured}"
        )
    return NAMED[text](n)


def _star(n: int) -> nx.Graph:
    return nx.star_graph(n - 1)


def _exponential(n: int) -> nx.Graph:
    steps = [1 << k for k in range((n - 1).bit_length())]
    return nx.circulant_graph(n, steps)


def torus_shape(n: int) -> tuple[int, int]:
    """Return rows and columns of a torus, as square as n permits.

    Raises:
        ValueError: only a single row is possible.
    """
    rows = max((r for r in range(2, math.isqrt(n) + 1) if n % r == 0), default=None)
    if rows is None:
        fits = " or ".join(str(m) for m in (n - 1, n + 1) if m > 3)
        raise ValueError(
            f"workers ({n}) of a torus must be rows x columns, at least 2 x 2; "
            f"take {fits or 4} workers, or a ring"
        )
    return rows, n // rows


def _torus(n: int) -> nx.Graph:
    """Return a torus. A torus of two rows is a ladder whose ends are connected."""
    rows, columns = torus_shape(n)
    made = nx.Graph()
    for worker in range(n):
        row, column = divmod(worker, columns)
        made.add_edge(worker, row * columns + (column + 1) % columns)
        made.add_edge(worker, (row + 1) % rows * columns + column)
    return made


NAMED: dict[str, Callable[[int], nx.Graph]] = {
    "complete": nx.complete_graph,
    "ring": nx.cycle_graph,
    "star": _star,
    "exponential": _exponential,
    "torus": _torus,
}


def _random_regular(text: str | None, n: int, seed: int) -> nx.Graph:
    if text is not None and not (text.isascii() and text.isdigit()):
        raise ValueError(f"degree ({text!r}) of random-regular must be an integer, as in :3")
    degree = min(DEGREE, n - 1) if text is None else int(text)
    if not 0 < degree < n or degree * n % 2:
        even = [m for m in range(max(degree + 1, n - 1), n + degree + 3) if degree * m % 2 == 0]
        fits = f"take {even[0]} workers, or " if degree > 0 else ""
        raise ValueError(
            f"degree ({degree}) must be from 1 to workers - 1 ({n - 1}), and degree x workers "
            f"even; {fits}a degree that fits"
        )
    for attempt in range(MOST_TRIES):
        found = nx.random_regular_graph(degree, n, seed=seed * MOST_TRIES + attempt)
        if nx.is_connected(found):
            return found
    raise ValueError(
        f"degree ({degree}) of random-regular must be larger for {n} workers to be connected; "
        "take at least 3"
    )


def _parse_pairs(text: str) -> list[list[int]]:
    try:
        return [[int(end) for end in pair.split("-")] for pair in text.split(",")]
    except ValueError:
        raise ValueError(f"edges ({text!r}) must be pairs of workers, as in 0-1,1-2") from None


def _graph_from_edges(edges: Iterable[Sequence[int]]) -> nx.Graph:
    made = nx.Graph()
    for edge in edges:
        if len(edge) != 2:
            raise ValueError(f"edge ({edge!r}) must be a pair of workers, as in (0, 1)")
        made.add_edge(*(int(end) for end in edge))
    return made


def _check(graph: nx.Graph, n: int) -> None:
    strangers = [node for node in graph.nodes if node not in range(n)]
    if strangers:
        raise ValueError(
            f"worker ({strangers[0]!r}) of the topology must be one of 0..{n - 1}; give as many "
            "workers as it has, numbered from 0"
        )
    loops = sorted(node for node, _ in nx.selfloop_edges(graph))
    if loops:
        raise ValueError(
            f"edge ({loops[0]}-{loops[0]}) must join two workers; leave self loops out"
        )
    _require_connected(graph, "add an edge between them")


def _require_connected(graph: nx.Graph, remedy: str) -> None:
    apart = parts(graph)
    if len(apart) > 1:
        raise ValueError(
            f"topology must be connected, but falls apart into {_as_text(apart)}; {remedy}"
        )


def parts(graph: nx.Graph) -> list[tuple[int, ...]]:
    """Return the connected components, the largest first; of equal ones, that with the smallest
    rank.
    """
    found = [tuple(sorted(part)) for part in nx.connected_components(graph)]
    return sorted(found, key=lambda part: (-len(part), part))


def _as_text(apart: Sequence[tuple[int, ...]], most: int = 8) -> str:
    """Return the components as text, with their first workers."""
    shown = []
    for part in apart[:most]:
        dots = ", .." if len(part) > most else ""
        shown.append(f"({', '.join(map(str, part[:most]))}{dots})")
    more = f" and {len(apart) - most} more" if len(apart) > most else ""
    return ", ".join(shown) + more


# --- constants -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """Spectral properties of a graph, and the constants of mixing and exchanges.

    Attributes:
        lambda2: second smallest eigenvalue of the Laplacian.
        chi1: 1 / lambda2.
        chi2: half the largest effective resistance of an edge.
        eta: mixing rate per unit of time.
        alpha: share of the difference that an exchange subtracts from x.
        alpha_tilde: share of the difference that an exchange subtracts from x~.
    """

    lambda2: float
    chi1: float
    chi2: float
    eta: float
    alpha: float
    alpha_tilde: float


def edge_rates(graph: nx.Graph, rate: float = 1.0) -> dict[Edge, float]:
    """Return the exchanges of each edge per unit of time: 2 * rate / (degree_i + degree_j).

    `rate` is the number of exchanges of a worker per unit of time. It is exact if all degrees are
    equal.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(
            f"rate ({rate:g}) must be finite and more than 0 exchanges per gradient; take 1"
        )
    degree = {node: len(graph.adj[node]) for node in graph}
    edges = sorted(cast(Edge, (min(edge), max(edge))) for edge in graph.edges)
    return {(i, j): 2 * rate / (degree[i] + degree[j]) for i, j in edges}


def constants(rates: Rates, nodes: Sequence[int] | int) -> Constants:
    """Return the constants of A2CiD2 for a graph with the given rates.

    Args:
        rates: exchanges per unit of time of each edge.
        nodes: the workers, or their number.

    Raises:
        ValueError: the graph is not connected, or its second eigenvalue is below the rounding
            error.

    Source: Nabli, Belilovsky and Oyallon, 2023.
    """
    workers = list(range(nodes) if isinstance(nodes, int) else nodes)
    at = {worker: place for place, worker in enumerate(workers)}
    _check_rates(rates, at)
    ends = np.array([[at[i], at[j]] for i, j in rates], dtype=np.intp).reshape(-1, 2)
    values = np.array(list(rates.values()), dtype=np.float64)
    scale = float(values.max())  # avoids overflow and underflow of the rates
    lambda2, resistance = _spectrum(len(workers), ends, values / scale)
    chi1, chi2 = 1 / (lambda2 * scale), 0.5 * float(resistance.max()) / scale
    root = math.sqrt(chi1) * math.sqrt(chi2)
    eta = 0.5 / root if 0 < root < math.inf else math.inf
    result = Constants(lambda2 * scale, chi1, chi2, eta, 0.5, 0.5 * math.sqrt(chi1 / chi2))
    if not all(map(math.isfinite, (chi1, chi2, eta, result.alpha_tilde))) or eta == 0.0:
        raise ValueError(
            f"eta ({eta:g}) must be finite and more than 0, but chi1 is {chi1:g} and chi2 "
            f"{chi2:g}; use rates nearer to 1 exchange per unit time"
        )
    return result


def _spectrum(
    n: int, ends: NDArray[np.intp], rates: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Return the second eigenvalue of the Laplacian, and the effective resistance of each edge.

    A dense matrix takes time `n^3`. A larger graph that looks the same from each worker, such as a
    ring, takes `n log n`.
    """
    row = _circulant_row(n, ends, rates) if n > MOST_DENSE else None
    if row is not None:
        eigenvalues = np.fft.fft(row).real
        eigenvalues[0] = np.inf
        inverse = np.fft.ifft(1 / eigenvalues).real
        across = 2 * (inverse[0] - inverse[np.abs(ends[:, 0] - ends[:, 1])])
        return float(eigenvalues.min()), across
    i, j = ends.T
    laplacian = np.zeros((n, n))
    laplacian[i, j] = laplacian[j, i] = -rates
    laplacian[np.diag_indices(n)] = -laplacian.sum(axis=0)
    values, vectors = np.linalg.eigh(laplacian)
    if values[1] <= n * np.finfo(float).eps * values[-1]:
        raise ValueError(
            f"lambda_2 ({values[1]:.2g} of {values[-1]:.2g}) must be more than rounding: the graph "
            f"of {n} workers hangs together too loosely; add edges, or raise the smallest rates"
        )
    across = vectors[i, 1:] - vectors[j, 1:]
    return float(values[1]), (across**2 / values[1:]).sum(axis=1)


def _circulant_row(
    n: int, ends: NDArray[np.intp], rates: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the first row of the Laplacian if each row is the one before it, shifted by one."""
    distances = np.abs(ends[:, 0] - ends[:, 1])
    distances = np.minimum(distances, n - distances)
    row = np.zeros(n)
    for distance in np.unique(distances):
        here = rates[distances == distance]
        if len(here) != n // (1 + (2 * distance == n)) or np.ptp(here):
            return None
        row[[distance, -distance]] = -here[0]
    row[0] = -row.sum()
    return row


def _check_rates(rates: Rates, at: Mapping[int, int]) -> None:
    if len(at) < 2:
        raise ValueError(f"workers ({len(at)}) must be at least 2; one alone needs no constants")
    graph = nx.Graph()
    graph.add_nodes_from(at)
    for (i, j), rate in rates.items():
        if i not in at or j not in at or i == j:
            raise ValueError(f"edge ({i}-{j}) must join two of the workers; leave it out")
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"rate ({rate:g}) of edge {i}-{j} must be finite and more than 0; "
                "leave out edges that are not used"
            )
        graph.add_edge(i, j)
    _require_connected(graph, "let one part go on alone, or add an edge between them")
