"""Event simulation of gossip: times of gradients and exchanges of each worker.

Each worker computes gradients without interruption, and exchanges with one other worker at a time.
A worker requests exchanges as a Poisson process, at half of its exchange rate, because its
neighbours request the other half. For each request it selects an idle neighbour at random, in
proportion to the rates of its edges. A request waits while the worker or all its neighbours are
busy. A worker stores at most `remembered` requests. The simulation computes times only, no
parameter values.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.sim.ranks import lognormal
from offbeat.gossip.graphs import Edge, Rates

DRAWS = 256  # random numbers per call of the generator
GRADIENT, REQUEST, TRANSFER, END = range(4)  # kinds of events

# --- input
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Time of exchanges. Both workers of an exchange send `message_bytes` at the same time.

    Attributes:
        message_bytes: bytes in each direction.
        nic_bytes_s: bytes per second of the network card of a host, in each direction; one value or
            one per host. Simultaneous exchanges share a card equally.
        edge_bytes_s: highest bytes per second of an edge; unlimited if missing.
        delay_s: seconds before the bytes of an exchange are sent; one value or one per edge.
        hosts: host of each worker, by default one host per worker. Exchanges within a host use no
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
    """Durations of gradients.

    Attributes:
        gradient_s: mean seconds per gradient of each worker.
        jitter: relative standard deviation of the lognormal factor on each gradient time.
    """

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
        """Return the common unit of time: the mean gradient time of all workers, in seconds."""
        return fmean(self.gradient_s)

    @classmethod
    def uneven(cls, n: int, *, every: int = 4, slower: float = 2.0, jitter: float = 0.0) -> Workers:
        """Return `n` workers with 1 s per gradient, of which the last of each `every` takes
        `slower` seconds.
        """
        return cls([slower if i % every == every - 1 else 1.0 for i in range(n)], jitter)


# --- output
# ----------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Time interval of a gradient or an exchange on a lane of one worker."""

    worker: int
    lane: Literal["compute", "gossip"]
    kind: Literal["gradient", "exchange"]
    start_s: float
    end_s: float
    partner: int | None


@dataclass(frozen=True)
class Timeline:
    """Gradients and exchanges in the order of their ends. Gradients and exchanges that are
    unfinished at `end_s` are missing. Times are seconds from the start.

    Attributes:
        n: number of workers.
        end_s: end of the simulation.
        unit_s: unit of time of the mixing, in seconds.
        gradient_worker: worker of each gradient, [gradients].
        gradient_start_s: start of each gradient, [gradients].
        gradient_end_s: end of each gradient, [gradients].
        exchange_edge: smaller and larger worker of each exchange, [exchanges, 2].
        exchange_by: worker that requested the exchange, [exchanges].
        exchange_wished_s: time of the request, [exchanges].
        exchange_start_s: start of each exchange, [exchanges].
        exchange_end_s: end of each exchange, [exchanges].
        forgotten: requests that each worker discarded because its queue was full, [n].
    """

    n: int
    end_s: float
    unit_s: float
    gradient_worker: NDArray[np.intp]
    gradient_start_s: NDArray[np.float64]
    gradient_end_s: NDArray[np.float64]
    exchange_edge: NDArray[np.intp]
    exchange_by: NDArray[np.intp]
    exchange_wished_s: NDArray[np.float64]
    exchange_start_s: NDArray[np.float64]
    exchange_end_s: NDArray[np.float64]
    forgotten: NDArray[np.intp]

    def gradients(self) -> NDArray[np.intp]:
        """Return the number of gradients that each worker has applied, [n]."""
        return np.bincount(self.gradient_worker, minlength=self.n)

    def exchanges(self) -> NDArray[np.intp]:
        """Return the number of exchanges of each pair of workers as a symmetric matrix, [n, n]."""
        counts = np.zeros((self.n, self.n), dtype=np.intp)
        np.add.at(counts, tuple(self.exchange_edge.T), 1)
        return counts + counts.T

    def rates(self) -> dict[Edge, float]:
        """Return the exchanges per unit of time of each edge with at least one exchange."""
        counts = np.triu(self.exchanges())
        units = self.end_s / self.unit_s
        return {(int(i), int(j)): float(counts[i, j] / units) for i, j in np.argwhere(counts)}

    def waiting_s(self) -> NDArray[np.float64]:
        """Return the total waiting time of the requests of each worker in seconds, [n]. Gradients
        do not wait.
        """
        seconds = self.exchange_start_s - self.exchange_wished_s
        return np.bincount(self.exchange_by, seconds, self.n).astype(np.float64)

    def lanes(self) -> Iterator[Stretch]:
        """Yield gradients and exchanges for a drawing. Intervals of the same worker are in order of
        time.
        """
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
    remembered: int = 1,
    seed: int = 0,
) -> Timeline:
    """Simulate gossip for `units` units of time or until all workers together have computed
    `gradients` gradients, whichever is first.

    Args:
        rates: exchanges per unit of time of each edge.
        workers: durations of gradients.
        network: time of exchanges; None if exchanges take no time.
        units: units of time to simulate.
        gradients: gradients to simulate.
        remembered: requests that a worker stores while none of its neighbours is idle.
        seed: seed of the random numbers.

    Returns:
        Times of all gradients and exchanges.

    Raises:
        ValueError: neither limit is finite, a value is out of range, or an edge contains an unknown
            worker.
    """
    if math.isinf(units) and math.isinf(gradients):
        raise ValueError("units (inf) must be finite, or gradients; say when to stop")
    if not (units > 0 and gradients > 0):
        raise ValueError(f"units ({units:g}) and gradients ({gradients:g}) must be more than 0")
    if remembered < 1:
        raise ValueError(f"remembered ({remembered}) must be at least 1 wish")
    run = _Run(rates, workers, network or Network(), remembered, seed)
    return run.run(units * workers.unit_s, gradients)


@dataclass(slots=True, eq=False)
class _Exchange:
    """Exchange in progress, with its current speed and the bytes that remain."""

    edge: int
    ends: Edge
    nics: tuple[int, ...]
    by: int
    wished_s: float
    start_s: float
    since_s: float = 0.0
    left_bytes: float = 0.0
    speed: float = 0.0
    version: int = 0  # number of the planned end; an END event of another version is obsolete


class _Run:
    """Simulation run: event queue and current state of all workers."""

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
        # Separate random streams, so that graph and network do not change the gradient times.
        factors, gaps, shares = (np.random.default_rng((seed, n)) for n in range(3))
        jitter = workers.jitter
        self._factors = _draws(lambda: lognormal(factors.standard_normal(DRAWS), jitter))
        self._gaps = _draws(lambda: gaps.exponential(size=DRAWS))
        self._shares = _draws(lambda: shares.uniform(size=DRAWS))
        self._events: list[tuple[float, int, int, int, _Exchange | None]] = []
        self._ties = 0
        # neighbours of each worker, with number and rate of the edge
        self._neighbours: list[dict[int, tuple[int, float]]] = [{} for _ in range(n)]
        for number, ((i, j), rate) in enumerate(rates.items()):
            self._neighbours[i][j] = self._neighbours[j][i] = number, rate
        totals = [sum(rate for _, rate in around.values()) for around in self._neighbours]
        self._interval_s = [2 * workers.unit_s / total if total else math.inf for total in totals]
        self._requests: list[deque[float]] = [deque() for _ in range(n)]
        self._busy = [False] * n
        self._at_nic: list[dict[int, _Exchange]] = [{} for _ in self.nic_bytes_s]
        self._gradient_start_s = [0.0] * n
        self._forgotten = [0] * n
        self._gradients: list[tuple[int, float, float]] = []
        self._exchanges: list[tuple[int, int, int, float, float, float]] = []

    def run(self, end_s: float, gradients: float) -> Timeline:
        for worker in range(self.n):
            self._compute(worker, 0.0)
            self._schedule_request(worker, 0.0)
        while True:
            now_s, _, kind, number, exchange = heappop(self._events)
            if now_s > end_s:
                break
            if kind == GRADIENT:
                self._gradients.append((number, self._gradient_start_s[number], now_s))
                if len(self._gradients) >= gradients:
                    end_s = now_s
                    break
                self._compute(number, now_s)
            elif kind == REQUEST:
                self._on_request(number, now_s)
            elif kind == TRANSFER:
                assert exchange is not None
                self._begin_transfer(exchange, now_s)
            elif exchange is not None and exchange.version == number:
                self._end_exchange(exchange, now_s)
        return self._timeline(end_s)

    def _push(self, at_s: float, kind: int, number: int, exchange: _Exchange | None = None) -> None:
        self._ties += 1
        heappush(self._events, (at_s, self._ties, kind, number, exchange))

    def _compute(self, worker: int, now_s: float) -> None:
        self._gradient_start_s[worker] = now_s
        self._push(now_s + self.workers.gradient_s[worker] * next(self._factors), GRADIENT, worker)

    def _schedule_request(self, worker: int, now_s: float) -> None:
        self._push(now_s + self._interval_s[worker] * next(self._gaps), REQUEST, worker)

    # ---- pairing ----------------------------------------------------------------------------

    def _on_request(self, worker: int, now_s: float) -> None:
        self._schedule_request(worker, now_s)
        wishes = self._requests[worker]
        if len(wishes) == self.remembered:
            self._forgotten[worker] += 1
            return
        wishes.append(now_s)
        if not self._busy[worker]:
            self._try_exchange(worker, now_s)

    def _try_exchange(self, worker: int, now_s: float) -> None:
        """Start an exchange with an idle neighbour, if there is one."""
        busy = self._busy
        free = [(to, *edge) for to, edge in self._neighbours[worker].items() if not busy[to]]
        if not free:
            return
        left = next(self._shares) * sum(rate for *_, rate in free)
        chosen = free[-1]  # rounding may leave no selection
        for one in free:
            left -= one[2]
            if left < 0:
                chosen = one
                break
        to, edge, _ = chosen
        self._start(worker, to, edge, now_s)

    def _start_waiting(self, ends: Edge, now_s: float) -> None:
        """Start waiting requests after the workers `ends` have become idle, the oldest request
        first.

        Requests of neighbours compete equally with those of `ends`. Otherwise the edges of `ends`
        would be used more often than planned.
        """
        near = {*ends, *(other for worker in ends for other in self._neighbours[worker])}
        wishes = sorted(
            (self._requests[worker][0], worker) for worker in near if self._requests[worker]
        )
        for _, worker in wishes:
            if not self._busy[worker]:
                self._try_exchange(worker, now_s)

    def _start(self, by: int, to: int, edge: int, now_s: float) -> None:
        self._busy[by] = self._busy[to] = True
        wished_s = self._requests[by].popleft()
        exchange = _Exchange(edge, self.edges[edge], self.nics[edge], by, wished_s, now_s)
        if self.delay_s[edge] > 0:
            self._push(now_s + self.delay_s[edge], TRANSFER, 0, exchange)
        else:
            self._begin_transfer(exchange, now_s)

    def _end_exchange(self, exchange: _Exchange, now_s: float) -> None:
        for nic in exchange.nics:
            del self._at_nic[nic][exchange.edge]
        self._update_speeds(exchange.nics, now_s)
        i, j = exchange.ends
        self._exchanges.append((i, j, exchange.by, exchange.wished_s, exchange.start_s, now_s))
        self._busy[i] = self._busy[j] = False
        self._start_waiting(exchange.ends, now_s)

    # ---- network cards ----------------------------------------------------------------------

    def _begin_transfer(self, exchange: _Exchange, now_s: float) -> None:
        """Start sending the bytes of an exchange."""
        exchange.left_bytes, exchange.since_s = self.network.message_bytes, now_s
        for nic in exchange.nics:
            self._at_nic[nic][exchange.edge] = exchange
        self._update_speeds(exchange.nics, now_s)
        if not exchange.nics:
            self._update_speed(exchange, now_s)

    def _update_speeds(self, nics: tuple[int, ...], now_s: float) -> None:
        """Update the speeds of all exchanges on some network cards."""
        for nic in nics:
            for exchange in self._at_nic[nic].values():
                self._update_speed(exchange, now_s)

    def _update_speed(self, exchange: _Exchange, now_s: float) -> None:
        """Set the speed to the smallest share of a card on the path, limited by the rate of the
        edge.
        """
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
        self._push(now_s + exchange.left_bytes / speed, END, exchange.version, exchange)

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
    """Return the host of each worker, and the rate of each host's network card."""
    hosts = list(network.hosts) or list(range(n))
    if len(hosts) != n:
        raise ValueError(f"hosts ({len(hosts)} values) must have one value per worker ({n})")
    if min(hosts) < 0:
        raise ValueError(f"hosts ({min(hosts)}) must be at least 0; number hosts from 0")
    cards, count = network.nic_bytes_s, max(hosts) + 1
    rates: list[float] = [*cards] if isinstance(cards, Sequence) else [cards] * count
    if len(rates) < count:
        raise ValueError(
            f"nic_bytes_s ({len(rates)} values) must have one value per host ({count})"
        )
    return hosts, rates


def _draws(draw: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    """Yield random numbers, of which `draw` generates several at a time."""
    while True:
        yield from draw().tolist()
