"""Gossip, event by event: when workers have their gradients and who exchanges with whom.

Every worker computes gradients without a pause. Beside that it exchanges with one other worker at
a time. At random times (a Poisson clock) it wishes for an exchange: half as often as it has one, as
others wish for the rest. It then takes one of the neighbours that are free, by the rates of its
edges. If none is free the wish waits for the first one that is; only so many wishes are remembered.
No values move here: `consensus` follows them along the timeline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.sim.ranks import lognormal
from offbeat.gossip.graphs import Edge, Rates

DRAWS = 256  # random numbers that are drawn together
GRADIENT, WISH, LEAVE, LAND = range(4)  # kinds of events

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
        cards = self.nic_bytes_s
        rates = [
            ("nic_bytes_s", one) for one in (cards if isinstance(cards, Sequence) else [cards])
        ]
        rates += [(f"edge_bytes_s[{edge}]", one) for edge, one in self.edge_bytes_s.items()]
        for name, value in rates:
            if not value > 0:
                raise ValueError(f"{name} ({value:g}) must be more than 0; leave the edge out")
        delays = self.delay_s.values() if isinstance(self.delay_s, Mapping) else [self.delay_s]
        amounts = [("message_bytes", self.message_bytes), *(("delay_s", one) for one in delays)]
        for name, value in amounts:
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

    `unit_s` is the unit of time of mixing. `exchange_by` had wished for the exchange at
    `exchange_wished_s`. `forgotten`: wishes of each worker that came while it remembered enough. A
    gradient or an exchange that is not finished at `end_s` is left out.
    """

    n: int
    end_s: float
    unit_s: float
    gradient_worker: NDArray[np.intp]
    gradient_start_s: NDArray[np.float64]
    gradient_end_s: NDArray[np.float64]
    exchange_edge: NDArray[np.intp]  # exchange, (smaller, larger) worker
    exchange_by: NDArray[np.intp]
    exchange_wished_s: NDArray[np.float64]
    exchange_start_s: NDArray[np.float64]
    exchange_end_s: NDArray[np.float64]
    forgotten: NDArray[np.intp]

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
        seconds = self.exchange_end_s - self.exchange_start_s
        i, j = self.exchange_edge.T
        return _sums(i, seconds, self.n) + _sums(j, seconds, self.n)

    def waiting_s(self) -> NDArray[np.float64]:
        """Seconds that each worker's wishes have waited, added up; its gradients went on."""
        return _sums(self.exchange_by, self.exchange_start_s - self.exchange_wished_s, self.n)

    def idle_s(self) -> NDArray[np.float64]:
        """Seconds in which each worker had no gradient to compute that was finished."""
        seconds = self.gradient_end_s - self.gradient_start_s
        return self.end_s - _sums(self.gradient_worker, seconds, self.n)

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


def _sums(workers: NDArray[np.intp], seconds: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Of the seconds of each worker."""
    found = np.zeros(n)
    np.add.at(found, workers, seconds)
    return found


# --- the simulation ------------------------------------------------------------------------------


def simulate(
    rates: Rates,
    workers: Workers,
    network: Network | None = None,
    *,
    units: float = math.inf,
    gradients: float = math.inf,
    remembered: int = 1,
    seed: int = 0,
) -> Timeline:
    """Run until so many units of time are over, or all workers together have so many gradients.

    `rates`: exchanges per unit time of every edge. Without a network an exchange takes no time.
    `remembered`: wishes that a worker keeps while nobody is free. ValueError if neither limit is
    finite, or an edge has a worker that there is not.
    """
    if math.isinf(units) and math.isinf(gradients):
        raise ValueError("units (inf) must be finite, or gradients; say when to stop")
    if not (units > 0 and gradients > 0):
        raise ValueError(f"units ({units:g}) and gradients ({gradients:g}) must be more than 0")
    if remembered < 1:
        raise ValueError(f"remembered ({remembered}) must be at least 1 wish")
    run = _Run(rates, workers, network or Network(), remembered, seed)
    return run.until(units * workers.unit_s, gradients)


def poisson(rates: Rates, n: int, units: float, *, seed: int = 0) -> Timeline:
    """Exchanges alone, which take no time, of n workers; a unit is a second. Quick."""
    rng = np.random.default_rng((seed, 1))
    edges, each = np.array(list(rates), dtype=np.intp), np.array(list(rates.values()))
    at_s = np.sort(rng.uniform(0, units, rng.poisson(each.sum() * units)))
    which = rng.choice(len(edges), size=len(at_s), p=each / each.sum())
    none = np.empty(0)
    nobody = none.astype(np.intp)
    by, zeros = edges[which, 0], np.zeros(n, dtype=np.intp)
    return Timeline(n, units, 1.0, nobody, none, none, edges[which], by, at_s, at_s, at_s, zeros)


class _Exchange:
    """One that runs: the bytes left at its current speed."""

    __slots__ = (
        "by", "edge", "ends", "left_bytes", "nics", "since_s", "speed", "start_s", "version",
        "wished_s",
    )  # fmt: skip

    def __init__(self, edge: int, ends: Edge, nics: tuple[int, ...], by: int, wished_s: float):
        self.edge, self.ends, self.nics = edge, ends, nics
        self.by, self.wished_s = by, wished_s
        self.start_s = self.since_s = self.left_bytes = self.speed = 0.0
        self.version = 0  # of its planned end


class _Run:
    def __init__(
        self, rates: Rates, workers: Workers, network: Network, remembered: int, seed: int
    ) -> None:
        self.n = n = len(workers.gradient_s)
        self.workers, self.network, self.remembered = workers, network, remembered
        self.edges = list(rates)
        for i, j in self.edges:
            if not 0 <= i < j < n:
                raise ValueError(
                    f"edge ({i}-{j}) must join two of the {n} workers, the smaller one first"
                )
        hosts, self.nic_bytes_s = _hosts(network, n)
        self.nics = [(hosts[i], hosts[j]) if hosts[i] != hosts[j] else () for i, j in self.edges]
        self.edge_bytes_s = [network.edge_bytes_s.get(edge, math.inf) for edge in self.edges]
        self.delay_s = [network.delay_of(edge) for edge in self.edges]
        # Streams of their own: neither the graph nor the network changes what gradients take.
        self._factor = _draws(np.random.default_rng((seed, 0)), workers.jitter)
        self._gap = _gaps(np.random.default_rng((seed, 1)))
        self._share = _shares(np.random.default_rng((seed, 2)))
        self._agenda: list[tuple[float, int, int, int, _Exchange | None]] = []
        self._ties = 0
        # Of every worker its neighbours, each with the edge's number and rate.
        self._around: list[dict[int, tuple[int, float]]] = [{} for _ in range(n)]
        for number, ((i, j), rate) in enumerate(rates.items()):
            self._around[i][j] = self._around[j][i] = number, rate
        totals = [sum(rate for _, rate in around.values()) for around in self._around]
        self._every_s = [2 * workers.unit_s / total if total else math.inf for total in totals]
        self._wishes: list[deque[float]] = [deque() for _ in range(n)]
        self._busy = [False] * n
        self._at_nic: list[dict[int, _Exchange]] = [{} for _ in self.nic_bytes_s]
        self._began_s = [0.0] * n
        self._forgotten = [0] * n
        self._gradients: list[tuple[int, float, float]] = []
        self._exchanges: list[tuple[int, int, int, float, float, float]] = []

    def until(self, end_s: float, gradients: float) -> Timeline:
        for worker in range(self.n):
            self._compute(worker, 0.0)
            self._wind(worker, 0.0)
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
            elif kind == WISH:
                self._wish(number, now_s)
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

    def _wind(self, worker: int, now_s: float) -> None:
        self._note(now_s + self._every_s[worker] * next(self._gap), WISH, worker)

    # ---- pairing ----------------------------------------------------------------------------

    def _wish(self, worker: int, now_s: float) -> None:
        self._wind(worker, now_s)
        wishes = self._wishes[worker]
        if len(wishes) == self.remembered:
            self._forgotten[worker] += 1
            return
        wishes.append(now_s)
        if not self._busy[worker]:
            self._ask(worker, now_s)

    def _ask(self, worker: int, now_s: float) -> None:
        """Begin an exchange with a neighbour that is free, if there is one."""
        busy = self._busy
        free = [(to, *edge) for to, edge in self._around[worker].items() if not busy[to]]
        if not free:
            return
        left = next(self._share) * sum(rate for *_, rate in free)
        chosen = free[-1]  # should rounding leave nobody
        for one in free:
            left -= one[2]
            if left < 0:
                chosen = one
                break
        to, edge, _ = chosen
        self._start(worker, to, edge, now_s)

    def _rest(self, ends: Edge, now_s: float) -> None:
        """Two workers are free: they and those around them ask, who has waited longest first. None
        of the two comes before the other, or its edges would be used more often."""
        near = {*ends, *(other for worker in ends for other in self._around[worker])}
        wishes = sorted(
            (self._wishes[worker][0], worker) for worker in near if self._wishes[worker]
        )
        for _, worker in wishes:
            if not self._busy[worker]:
                self._ask(worker, now_s)

    def _start(self, by: int, to: int, edge: int, now_s: float) -> None:
        self._busy[by] = self._busy[to] = True
        wished_s = self._wishes[by].popleft()
        exchange = _Exchange(edge, self.edges[edge], self.nics[edge], by, wished_s)
        exchange.start_s = now_s
        if self.delay_s[edge] > 0:
            self._note(now_s + self.delay_s[edge], LEAVE, 0, exchange)
        else:
            self._leave(exchange, now_s)

    def _land(self, exchange: _Exchange, now_s: float) -> None:
        for nic in exchange.nics:
            del self._at_nic[nic][exchange.edge]
        self._share_cards(exchange.nics, now_s)
        i, j = exchange.ends
        self._exchanges.append((i, j, exchange.by, exchange.wished_s, exchange.start_s, now_s))
        self._busy[i] = self._busy[j] = False
        self._rest(exchange.ends, now_s)

    # ---- network cards ----------------------------------------------------------------------

    def _leave(self, exchange: _Exchange, now_s: float) -> None:
        """Bytes begin to flow."""
        exchange.left_bytes, exchange.since_s = self.network.message_bytes, now_s
        for nic in exchange.nics:
            self._at_nic[nic][exchange.edge] = exchange
        self._share_cards(exchange.nics, now_s)
        if not exchange.nics:
            self._flow(exchange, now_s)

    def _share_cards(self, nics: tuple[int, ...], now_s: float) -> None:
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
        i, j, by, wished_s, start_s, stop_s = (
            np.array(self._exchanges, dtype=np.float64).reshape(-1, 6).T
        )
        return Timeline(
            self.n,
            end_s,
            self.workers.unit_s,
            gradients[0].astype(np.intp),
            gradients[1],
            gradients[2],
            np.stack([i, j], axis=1).astype(np.intp),
            by.astype(np.intp),
            wished_s,
            start_s,
            stop_s,
            np.array(self._forgotten, dtype=np.intp),
        )


def _hosts(network: Network, n: int) -> tuple[list[int], list[float]]:
    """The host of every worker, and the rate of every host's network card."""
    hosts = list(network.hosts) or list(range(n))
    if len(hosts) != n:
        raise ValueError(f"hosts ({len(hosts)} values) must have one value per worker ({n})")
    cards, count = network.nic_bytes_s, max(hosts) + 1
    rates: list[float] = [*cards] if isinstance(cards, Sequence) else [cards] * count
    if len(rates) < count:
        raise ValueError(
            f"nic_bytes_s ({len(rates)} values) must have one value per host ({count})"
        )
    return hosts, rates


def _draws(rng: np.random.Generator, jitter: float) -> Iterator[float]:
    """Lognormal factors of mean 1."""
    while True:
        if jitter == 0:
            yield 1.0
            continue
        yield from lognormal(rng.standard_normal(DRAWS), jitter).tolist()


def _gaps(rng: np.random.Generator) -> Iterator[float]:
    """Exponential times of mean 1."""
    while True:
        yield from rng.exponential(size=DRAWS).tolist()


def _shares(rng: np.random.Generator) -> Iterator[float]:
    """From 0 to 1."""
    while True:
        yield from rng.uniform(size=DRAWS).tolist()
