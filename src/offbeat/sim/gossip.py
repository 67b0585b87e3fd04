"""Gossip, event by event: when workers have their gradients and who exchanges with whom.

Every worker computes gradients without a pause. Beside that it exchanges with one other worker at a
time. Every edge has a Poisson clock. When it rings, the exchange begins if both ends are free, and
else as soon as they are; of several that wait, the one that rang first. A clock that rings while its
edge's last exchange still waits or runs is not heard, so what is late never piles up. No values
move here: `consensus` follows them along the timeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.sim.ranks import lognormal
from offbeat.solve.graphs import Edge, Rates

DRAWS = 256  # random numbers that are drawn together
GRADIENT, RING, LEAVE, LAND = range(4)  # kinds of events

# --- what is simulated ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """What exchanges take. Each sends `message_bytes` both ways at once.

    `nic_bytes_s`: of one host, in each direction; exchanges that pass it at the same time share it
    equally. `edge_bytes_s`: the most that an edge carries. `delay_s`: before an exchange's bytes
    flow. `hosts`: the host of every worker, by default its own; workers of one host do without the
    network card.
    """

    message_bytes: float = 0.0
    nic_bytes_s: float | Sequence[float] = math.inf
    edge_bytes_s: Mapping[Edge, float] = field(default_factory=dict)
    delay_s: float | Mapping[Edge, float] = 0.0
    hosts: Sequence[int] = ()

    def __post_init__(self) -> None:
        nics = [self.nic_bytes_s] if isinstance(self.nic_bytes_s, (int, float)) else self.nic_bytes_s
        for name, value in [
            *(("nic_bytes_s", nic) for nic in nics),
            *((f"edge_bytes_s[{edge}]", one) for edge, one in self.edge_bytes_s.items()),
        ]:
            if not value > 0:
                raise ValueError(f"{name} ({value:g}) must be more than 0; leave the edge out")
        delays = self.delay_s.values() if isinstance(self.delay_s, Mapping) else [self.delay_s]
        for name, value in [("message_bytes", self.message_bytes), *(("delay_s", d) for d in delays)]:
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be finite and at least 0")

    def delay_of(self, edge: Edge) -> float:
        return self.delay_s.get(edge, 0.0) if isinstance(self.delay_s, Mapping) else self.delay_s


@dataclass(frozen=True)
class Workers:
    """How long gradients take: the mean seconds of each worker, and the relative deviation of a
    lognormal factor on them."""

    gradient_s: Sequence[float]
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for worker, seconds in enumerate(self.gradient_s):
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"gradient_s[{worker}] ({seconds:g}) must be finite and more than 0 seconds"
                )
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter ({self.jitter:g}) must be finite and at least 0")

    @property
    def unit_s(self) -> float:
        """The common unit of time: the mean gradient time over workers."""
        return fmean(self.gradient_s)

    @classmethod
    def uneven(cls, n: int, *, every: int = 4, slower: float = 2.0, jitter: float = 0.0) -> Workers:
        """Gradients of a second, and of `slower` seconds for the last worker of `every`."""
        return cls([slower if i % every == every - 1 else 1.0 for i in range(n)], jitter)


# --- what comes out ------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Something that took time on a lane of one worker."""

    worker: int
    lane: Literal["compute", "gossip"]
    kind: Literal["gradient", "exchange"]
    start_s: float
    end_s: float
    partner: int | None


@dataclass(frozen=True)
class Timeline:
    """Gradients and exchanges in the order in which they end; seconds from the start.

    `unit_s` is the unit of time of mixing. `unheard`: how often the clock of an edge rang in vain.
    A gradient or an exchange that is not finished at `end_s` is left out.
    """

    n: int
    end_s: float
    unit_s: float
    gradient_worker: NDArray[np.intp]
    gradient_start_s: NDArray[np.float64]
    gradient_end_s: NDArray[np.float64]
    exchange_edge: NDArray[np.intp]  # exchange, (smaller, larger) worker
    exchange_rang_s: NDArray[np.float64]
    exchange_start_s: NDArray[np.float64]
    exchange_end_s: NDArray[np.float64]
    unheard: Mapping[Edge, int]

    @property
    def events(self) -> int:
        return len(self.gradient_worker) + len(self.exchange_edge)

    def gradients(self) -> NDArray[np.intp]:
        """How many gradients each worker has applied."""
        return np.bincount(self.gradient_worker, minlength=self.n)

    def exchanges(self) -> NDArray[np.intp]:
        """How often each worker has exchanged with each other one; symmetric."""
        counts = np.zeros((self.n, self.n), dtype=np.intp)
        np.add.at(counts, tuple(self.exchange_edge.T), 1)
        return counts + counts.T

    def rates(self) -> dict[Edge, float]:
        """Exchanges per unit time of every edge that has exchanged."""
        counts = np.triu(self.exchanges())
        units = self.end_s / self.unit_s
        return {(int(i), int(j)): float(counts[i, j] / units) for i, j in np.argwhere(counts)}

    def exchanging_s(self) -> NDArray[np.float64]:
        """Seconds that each worker has spent in exchanges."""
        return self._per_worker(self.exchange_end_s - self.exchange_start_s)

    def waiting_s(self) -> NDArray[np.float64]:
        """Seconds that exchanges of each worker have waited for one of their ends, added up."""
        return self._per_worker(self.exchange_start_s - self.exchange_rang_s)

    def idle_s(self) -> NDArray[np.float64]:
        """Seconds in which each worker had no gradient to compute that was finished."""
        seconds = self.gradient_end_s - self.gradient_start_s
        return self.end_s - np.bincount(self.gradient_worker, seconds, minlength=self.n)

    def _per_worker(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        ends = self.exchange_edge.T
        return sum(np.bincount(end, seconds, minlength=self.n) for end in ends)  # type: ignore[return-value]

    def lanes(self) -> Iterator[Stretch]:
        """Gradients and exchanges for a picture, those of one worker in order of time."""
        for worker, start, end in zip(
            self.gradient_worker.tolist(),
            self.gradient_start_s.tolist(),
            self.gradient_end_s.tolist(),
            strict=True,
        ):
            yield Stretch(worker, "compute", "gradient", start, end, None)
        for (i, j), start, end in zip(
            self.exchange_edge.tolist(),
            self.exchange_start_s.tolist(),
            self.exchange_end_s.tolist(),
            strict=True,
        ):
            yield Stretch(i, "gossip", "exchange", start, end, j)
            yield Stretch(j, "gossip", "exchange", start, end, i)


# --- the simulation ------------------------------------------------------------------------------


def simulate(
    rates: Rates,
    workers: Workers,
    network: Network | None = None,
    *,
    units: float = math.inf,
    gradients: float = math.inf,
    seed: int = 0,
) -> Timeline:
    """Run until so many units of time are over, or all workers together have so many gradients.

    `rates`: exchanges per unit time of every edge. Without a network an exchange takes no time.
    ValueError if neither limit is finite, or an edge has a worker that there is not.
    """
    if math.isinf(units) and math.isinf(gradients):
        raise ValueError("units (inf) must be finite, or gradients; say when to stop")
    if not (units > 0 and gradients > 0):
        raise ValueError(f"units ({units:g}) and gradients ({gradients:g}) must be more than 0")
    run = _Run(rates, workers, network or Network(), seed)
    return run.until(units * workers.unit_s, gradients)


def poisson(rates: Rates, n: int, units: float, *, seed: int = 0) -> Timeline:
    """Exchanges alone, which take no time, of n workers; a unit is a second. Quick."""
    rng = np.random.default_rng((seed, 1))
    edges, each = np.array(list(rates), dtype=np.intp), np.array(list(rates.values()))
    at_s = np.sort(rng.uniform(0, units, rng.poisson(each.sum() * units)))
    which = rng.choice(len(edges), size=len(at_s), p=each / each.sum())
    none = np.empty(0)
    nobody = none.astype(np.intp)
    return Timeline(n, units, 1.0, nobody, none, none, edges[which], at_s, at_s, at_s, {})


class _Exchange:
    """One that rang, waits, runs: the bytes left at its current speed."""

    __slots__ = ("edge", "ends", "left_bytes", "nics", "rang_s", "since_s", "speed", "start_s", "version")

    def __init__(self, edge: int, ends: Edge, nics: tuple[int, ...], rang_s: float) -> None:
        self.edge, self.ends, self.nics, self.rang_s = edge, ends, nics, rang_s
        self.start_s = self.since_s = self.left_bytes = self.speed = 0.0
        self.version = 0  # of its planned end


class _Run:
    def __init__(self, rates: Rates, workers: Workers, network: Network, seed: int) -> None:
        n = len(workers.gradient_s)
        self.workers, self.network, self.n = workers, network, n
        self.edges = list(rates)
        for i, j in self.edges:
            if not 0 <= i < j < n:
                raise ValueError(
                    f"edge ({i}-{j}) must join two of the {n} workers, the smaller one first"
                )
        hosts = list(network.hosts) or list(range(n))
        if len(hosts) != n:
            raise ValueError(f"hosts ({len(hosts)} values) must have one value per worker ({n})")
        cards = network.nic_bytes_s
        count = max(hosts) + 1
        self.nic_bytes_s = [cards] * count if isinstance(cards, (int, float)) else list(cards)
        if len(self.nic_bytes_s) < count:
            raise ValueError(
                f"nic_bytes_s ({len(self.nic_bytes_s)} values) must have one value per host ({count})"
            )
        self.nics = [(hosts[i], hosts[j]) if hosts[i] != hosts[j] else () for i, j in self.edges]
        self.edge_bytes_s = [network.edge_bytes_s.get(edge, math.inf) for edge in self.edges]
        self.delay_s = [network.delay_of(edge) for edge in self.edges]
        # Streams of their own: neither the graph nor the network changes what gradients take.
        self._factor = _draws(np.random.default_rng((seed, 0)), workers.jitter)
        self._gap = _gaps(np.random.default_rng((seed, 1)))
        self._every_s = [workers.unit_s / rates[edge] for edge in self.edges]
        self._agenda: list[tuple[float, int, int, int, _Exchange | None]] = []
        self._ties = 0
        self._waits: list[dict[int, _Exchange]] = [{} for _ in range(n)]  # by worker and edge
        self._busy = [False] * n
        self._open = [False] * len(self.edges)  # rang, and has not ended
        self._at_nic: list[dict[int, _Exchange]] = [{} for _ in range(count)]
        self._began_s = [0.0] * n
        self._unheard = [0] * len(self.edges)
        self._gradients: list[tuple[int, float, float]] = []
        self._exchanges: list[tuple[int, int, float, float, float]] = []

    def until(self, end_s: float, gradients: float) -> Timeline:
        for worker in range(self.n):
            self._compute(worker, 0.0)
        for edge in range(len(self.edges)):
            self._wind(edge, 0.0)
        while True:
            now_s, _, kind, number, exchange = heappop(self._agenda)
            if now_s > end_s:
                break
            if kind == GRADIENT:
                self._gradients.append((number, self._began_s[number], now_s))
                if len(self._gradients) >= gradients:
                    end_s = now_s
                    break
                self._compute(number, now_s)
            elif kind == RING:
                self._ring(number, now_s)
            elif kind == LEAVE:
                assert exchange is not None
                self._leave(exchange, now_s)
            elif exchange is not None and exchange.version == number:
                self._land(exchange, now_s)
        return self._timeline(end_s)

    def _note(self, at_s: float, kind: int, number: int, exchange: _Exchange | None = None) -> None:
        self._ties += 1
        heappush(self._agenda, (at_s, self._ties, kind, number, exchange))

    def _compute(self, worker: int, now_s: float) -> None:
        self._began_s[worker] = now_s
        self._note(now_s + self.workers.gradient_s[worker] * next(self._factor), GRADIENT, worker)

    def _wind(self, edge: int, now_s: float) -> None:
        self._note(now_s + self._every_s[edge] * next(self._gap), RING, edge)

    # ---- pairing ----------------------------------------------------------------------------

    def _ring(self, edge: int, now_s: float) -> None:
        self._wind(edge, now_s)
        if self._open[edge]:
            self._unheard[edge] += 1
            return
        self._open[edge] = True
        i, j = self.edges[edge]
        exchange = _Exchange(edge, (i, j), self.nics[edge], now_s)
        if self._busy[i] or self._busy[j]:
            self._waits[i][edge] = self._waits[j][edge] = exchange
        else:
            self._start(exchange, now_s)

    def _start(self, exchange: _Exchange, now_s: float) -> None:
        i, j = exchange.ends
        self._busy[i] = self._busy[j] = True
        exchange.start_s = now_s
        delay_s = self.delay_s[exchange.edge]
        if delay_s > 0:
            self._note(now_s + delay_s, LEAVE, 0, exchange)
        else:
            self._leave(exchange, now_s)

    def _land(self, exchange: _Exchange, now_s: float) -> None:
        for nic in exchange.nics:
            del self._at_nic[nic][exchange.edge]
        self._share(exchange.nics, now_s)
        i, j = exchange.ends
        self._exchanges.append((i, j, exchange.rang_s, exchange.start_s, now_s))
        self._open[exchange.edge] = False
        self._busy[i] = self._busy[j] = False
        for worker in (i, j):
            self._next(worker, now_s)

    def _next(self, worker: int, now_s: float) -> None:
        """Start the exchange of a free worker that has waited longest, if there is one."""
        if self._busy[worker]:  # the other end has just started one with it
            return
        for edge, exchange in self._waits[worker].items():  # in the order in which they rang
            i, j = exchange.ends
            if not (self._busy[i] or self._busy[j]):
                del self._waits[i][edge], self._waits[j][edge]
                self._start(exchange, now_s)
                return

    # ---- network cards ----------------------------------------------------------------------

    def _leave(self, exchange: _Exchange, now_s: float) -> None:
        """Bytes begin to flow."""
        exchange.left_bytes, exchange.since_s = self.network.message_bytes, now_s
        for nic in exchange.nics:
            self._at_nic[nic][exchange.edge] = exchange
        self._share(exchange.nics, now_s)
        if not exchange.nics:
            self._flow(exchange, now_s)

    def _share(self, nics: tuple[int, ...], now_s: float) -> None:
        """New speeds of all that pass some network cards."""
        for nic in nics:
            for exchange in self._at_nic[nic].values():
                self._flow(exchange, now_s)

    def _flow(self, exchange: _Exchange, now_s: float) -> None:
        """The speed is the smallest share of a card on the way, and at most the edge's."""
        speed = self.edge_bytes_s[exchange.edge]
        for nic in exchange.nics:
            speed = min(speed, self.nic_bytes_s[nic] / len(self._at_nic[nic]))
        if speed == exchange.speed:
            return
        if exchange.speed > 0:
            sent = (now_s - exchange.since_s) * exchange.speed
            exchange.left_bytes = max(exchange.left_bytes - sent, 0.0)
        exchange.since_s, exchange.speed = now_s, speed
        exchange.version += 1
        self._note(now_s + exchange.left_bytes / speed, LAND, exchange.version, exchange)

    # ---- the end ----------------------------------------------------------------------------

    def _timeline(self, end_s: float) -> Timeline:
        gradients = np.array(self._gradients, dtype=np.float64).reshape(-1, 3).T
        exchanges = np.array(self._exchanges, dtype=np.float64).reshape(-1, 5).T
        return Timeline(
            self.n,
            end_s,
            self.workers.unit_s,
            gradients[0].astype(np.intp),
            gradients[1],
            gradients[2],
            exchanges[:2].T.astype(np.intp),
            exchanges[2],
            exchanges[3],
            exchanges[4],
            {edge: count for edge, count in zip(self.edges, self._unheard, strict=True) if count},
        )


def _draws(rng: np.random.Generator, jitter: float) -> Iterator[float]:
    """Lognormal factors of mean 1."""
    while True:
        if jitter == 0:
            yield 1.0
            continue
        yield from lognormal(rng.standard_normal(DRAWS), np.full(DRAWS, jitter)).tolist()


def _gaps(rng: np.random.Generator) -> Iterator[float]:
    """Exponential times of mean 1."""
    while True:
        yield from rng.exponential(size=DRAWS).tolist()
