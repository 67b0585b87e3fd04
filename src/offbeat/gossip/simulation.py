"""Simulation of gossip: times of gradients and exchanges, by the pairing of real workers.

Each worker computes gradients without interruption, and requests exchanges as `Requests` draws
them. Requests, answers, bytes and confirmations are messages between the workers, as on sockets.
The simulation computes times only, no parameter values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.sim.ranks import lognormal
from offbeat.gossip.graphs import Edge, Rates
from offbeat.gossip.pairing import Action, Begin, Pairing, Requests
from offbeat.gossip.protocol import Kind
from offbeat.sessions.kernel import Inbox, Kernel, Port, Process, Stream

DRAWS = 256  # random numbers per call of the generator

# --- input
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Time of exchanges. Both workers of an exchange send `message_bytes` at the same time.

    Attributes:
        message_bytes: bytes in each direction.
        nic_bytes_s: bytes per second of a worker in each direction; one value or one per worker.
        edge_bytes_s: highest bytes per second of an edge; unlimited if missing.
        delay_s: seconds of delay of each message: the request, its answer, the bytes and their
            confirmation.
        coding_s: seconds of a worker before it sends its bytes.
    """

    message_bytes: float = 0.0
    nic_bytes_s: float | Sequence[float] = math.inf
    edge_bytes_s: Mapping[Edge, float] = field(default_factory=dict)
    delay_s: float = 0.0
    coding_s: float = 0.0

    def __post_init__(self) -> None:
        cards = self.nic_bytes_s
        rates = [
            ("nic_bytes_s", one) for one in (cards if isinstance(cards, Sequence) else [cards])
        ]
        rates += [(f"edge_bytes_s[{edge}]", one) for edge, one in self.edge_bytes_s.items()]
        for name, value in rates:
            if not value > 0:
                raise ValueError(f"{name} ({value:g}) must be more than 0; leave the edge out")
        for name in ("message_bytes", "delay_s", "coding_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be finite and at least 0")

    def rate_of(self, edge: Edge) -> float:
        """Return the bytes per second of an edge in each direction."""
        cards = self.nic_bytes_s
        ends = [cards[end] for end in edge] if isinstance(cards, Sequence) else [cards]
        return min(*ends, self.edge_bytes_s.get(edge, math.inf))


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
        exchange_start_s: start of each exchange, [exchanges].
        exchange_end_s: end of each exchange, [exchanges].
    """

    n: int
    end_s: float
    unit_s: float
    gradient_worker: NDArray[np.intp]
    gradient_start_s: NDArray[np.float64]
    gradient_end_s: NDArray[np.float64]
    exchange_edge: NDArray[np.intp]
    exchange_start_s: NDArray[np.float64]
    exchange_end_s: NDArray[np.float64]

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
    n = len(workers.gradient_s)
    for i, j in rates:
        if not 0 <= i < j < n:
            raise ValueError(
                f"edge ({i}-{j}) must join two of the {n} workers, the smaller one first"
            )
    return _Job(rates, workers, network or Network(), seed).run(units, gradients)


class _Worker:
    """Worker `me`: its pairing, its requests, and the exchange in progress."""

    def __init__(self, me: int, kernel: Kernel, rates: dict[int, float], seed: int) -> None:
        self.pairing, self.requests = Pairing(me, set(rates)), Requests(me, rates, seed)
        self.inbox = Inbox(kernel)
        self.streams: dict[int, Stream] = {}  # by receiver
        self.received = self.confirmed = False


class _Job:
    """All workers as processes, and what has happened so far."""

    def __init__(self, rates: Rates, workers: Workers, network: Network, seed: int) -> None:
        self._kernel = kernel = Kernel()
        self._times, self._network, n = workers, network, len(workers.gradient_s)
        draw = np.random.default_rng((seed, 0))
        self._factors = _draws(lambda: lognormal(draw.standard_normal(DRAWS), workers.jitter))
        around: list[dict[int, float]] = [{} for _ in range(n)]
        for (i, j), rate in rates.items():
            around[i][j] = around[j][i] = rate
        self._workers = [_Worker(i, kernel, around[i], seed) for i in range(n)]
        for edge in rates:
            for i, j in (edge, edge[::-1]):
                port = Port(kernel, network.rate_of(edge))
                put = self._workers[j].inbox.put
                self._workers[i].streams[j] = Stream(port, put, network.delay_s)
        self._begun: dict[Edge, float] = {}  # exchanges in progress, and when the first end began
        self._gradients: list[tuple[int, float, float]] = []
        self._exchanges: list[tuple[int, int, float, float]] = []

    def run(self, units: float, gradients: float) -> Timeline:
        for i in range(len(self._workers)):
            for process in (self._train(i), self._request(i), self._listen(i)):
                self._kernel.spawn(process)
        end_s = units * self._times.unit_s
        self._kernel.run(end_s, lambda: len(self._gradients) >= gradients)
        whole = len(self._gradients) >= gradients
        return self._timeline(self._kernel.now if whole else end_s)

    def _train(self, i: int) -> Process:
        while True:
            begin_s = self._kernel.now
            yield self._times.gradient_s[i] * next(self._factors)
            self._gradients.append((i, begin_s, self._kernel.now))

    def _request(self, i: int) -> Process:
        worker = self._workers[i]
        units = worker.requests.wait()
        while units < math.inf:
            yield units * self._times.unit_s
            units = worker.requests.wait()  # drawn before the neighbour, as by real workers
            self._perform(i, worker.pairing.request(worker.requests.choose()))

    def _listen(self, i: int) -> Process:
        worker = self._workers[i]
        while True:
            peer, word = yield worker.inbox
            if word is Kind.CHUNK:
                worker.received = True
                worker.streams[peer].send(0, (i, Kind.WHOLE))
            elif word is Kind.WHOLE:
                worker.confirmed = True
            else:
                self._perform(i, worker.pairing.receive(peer, word))
                continue
            if worker.received and worker.confirmed:
                self._end(i, peer)

    def _perform(self, i: int, actions: Sequence[Action]) -> None:
        worker = self._workers[i]
        for action in actions:
            if isinstance(action, Begin):
                self._begun.setdefault(_edge(i, action.partner), self._kernel.now)
                worker.received = worker.confirmed = False
                stream = worker.streams[action.partner]
                bytes_sent = self._network.message_bytes, (i, Kind.CHUNK)
                self._kernel.call(
                    self._network.coding_s, lambda sent, to=stream: to.send(*sent), bytes_sent
                )
            else:
                worker.streams[action.to].send(0, (i, action.word))

    def _end(self, i: int, peer: int) -> None:
        edge = _edge(i, peer)
        if edge in self._begun:  # both ends have all bytes, and one of them knows
            self._exchanges.append((*edge, self._begun.pop(edge), self._kernel.now))
        self._perform(i, self._workers[i].pairing.end_exchange())

    def _timeline(self, end_s: float) -> Timeline:
        gradients = np.array(self._gradients, dtype=np.float64).reshape(-1, 3).T
        exchanges = np.array(self._exchanges, dtype=np.float64).reshape(-1, 4).T
        return Timeline(
            len(self._workers),
            end_s,
            self._times.unit_s,
            gradients[0].astype(np.intp),
            gradients[1],
            gradients[2],
            exchanges[:2].T.astype(np.intp),
            exchanges[2],
            exchanges[3],
        )


def _edge(i: int, j: int) -> Edge:
    return min(i, j), max(i, j)


def _draws(draw: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    """Yield random numbers, of which `draw` generates several at a time."""
    while True:
        yield from draw().tolist()
