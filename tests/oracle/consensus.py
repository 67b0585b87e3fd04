"""Numbers along a timeline of gossip: quadratic objectives under A2CiD2 and AD-PSGD.

What is simulated are the formulas alone, so that convergence can be studied in seconds: x and x~ of
all workers as rows, mixed whenever something happens to a worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.gossip.graphs import Constants, Edge, Rates
from offbeat.gossip.simulation import Timeline

Matrix = NDArray[np.float64]
Order = Literal["after_mixing", "before_mixing"]

LAND, GRADIENT, AT_ONCE, MEET = range(4)  # in this order where times are the same
FLOOR = 1e-24  # of the first squared distance; below it there is only rounding


def poisson(rates: Rates, n: int, units: float, *, seed: int = 0) -> Timeline:
    """Return a timeline of exchanges only, without duration, of `n` workers. A unit is one second.

    Faster than `simulate`, because exchanges are drawn all at once.
    """
    rng = np.random.default_rng((seed, 1))
    edges, each = np.array(list(rates), dtype=np.intp), np.array(list(rates.values()))
    at_s = np.sort(rng.uniform(0, units, rng.poisson(each.sum() * units)))
    which = rng.choice(len(edges), size=len(at_s), p=each / each.sum())
    none = np.empty(0)
    nobody = none.astype(np.intp)
    return Timeline(n, units, 1.0, nobody, none, none, edges[which], at_s, at_s)


def events(timeline: Timeline) -> int:
    """Return the number of gradients and exchanges."""
    return len(timeline.gradient_worker) + len(timeline.exchange_edge)


def idle_s(timeline: Timeline) -> Matrix:
    """Return the seconds of each worker outside of its finished gradients, [n]."""
    seconds = timeline.gradient_end_s - timeline.gradient_start_s
    return timeline.end_s - np.bincount(timeline.gradient_worker, seconds, timeline.n)


def exchanging_s(timeline: Timeline) -> Matrix:
    """Return the seconds that each worker has spent in exchanges, [n]."""
    seconds = timeline.exchange_end_s - timeline.exchange_start_s
    i, j = timeline.exchange_edge.T
    return np.bincount(i, seconds, timeline.n) + np.bincount(j, seconds, timeline.n)


@dataclass(frozen=True)
class Quadratic:
    """Worker i has f_i(x) = sum(curvature * (x - minima[i])**2) / 2 and sees gradients with normal
    noise of this deviation. The objective is the mean over workers."""

    curvature: Matrix  # dimension
    minima: Matrix  # worker, dimension
    noise: float = 0.0

    def gradient(self, worker: int, x: Matrix, rng: np.random.Generator) -> Matrix:
        exact = self.curvature * (x - self.minima[worker])
        return exact + self.noise * rng.standard_normal(len(x)) if self.noise else exact

    def excess(self, x: Matrix) -> float:
        """Mean over workers (rows of x) of the objective, above its minimum."""
        away = x - self.minima.mean(axis=0)
        return float((self.curvature * away**2).sum() / (2 * len(x)))

    @classmethod
    def random(
        cls, n: int, dimension: int, *, apart: float = 1.0, noise: float = 1.0, seed: int = 0
    ) -> Quadratic:
        """Curvatures from .1 to 1; minima of workers differ by `apart`, around 0."""
        minima = np.random.default_rng(seed).standard_normal((n, dimension)) * apart
        return cls(np.geomspace(0.1, 1.0, dimension), minima - minima.mean(axis=0), noise)


@dataclass(frozen=True)
class Course:
    """What was read, always after all workers were mixed to one time; times in units.

    `distance`: mean over workers of |x_i - mean|^2. `drift`: how far the mean of x is from the
    first mean plus all updates over n, relative to the size of x at the start. `excess`: mean loss
    of the workers above the least possible one; without an objective 0.
    """

    times: Matrix
    distance: Matrix
    drift: Matrix
    excess: Matrix
    x: Matrix  # of all workers at the last time

    def decay(self, begin: float = 0.0) -> float:
        """By how much ln(distance) falls per unit time from `begin` on, by least squares."""
        used = (self.times >= begin) & (self.distance > self.distance[0] * FLOOR)
        if used.sum() < 2:
            raise ValueError(
                f"begin ({begin:g}) must leave two readings that are more than rounding; read "
                "more often, or begin sooner"
            )
        return float(-np.polyfit(self.times[used], np.log(self.distance[used]), 1)[0])


def follow(
    timeline: Timeline,
    constants: Constants,
    x: ArrayLike,
    *,
    objective: Quadratic | None = None,
    learning_rate: float = 0.1,
    exchange: Order = "after_mixing",
    unit_s: float | Sequence[float] | None = None,
    readings: int = 200,
    seed: int = 0,
) -> Course:
    """What becomes of x (worker, dimension) along a timeline; without an objective gradients are 0.

    A gradient is taken at the point at which it began, and an exchange counts from its beginning.
    `unit_s`: the unit of time of mixing, by default the timeline's; with one value per worker their
    mean drifts, which is why the unit must be common.
    """
    start = np.array(x, dtype=np.float64)
    if start.ndim != 2 or len(start) != timeline.n:
        raise ValueError(
            f"x (shape {start.shape}) must have one row per worker ({timeline.n}); give the "
            "parameters of each"
        )
    chosen = timeline.unit_s if unit_s is None else unit_s
    units_s = np.broadcast_to(np.asarray(chosen, dtype=np.float64), timeline.n)
    replicas = _Replicas(start, constants, units_s, exchange)
    reader = _Reader(replicas, timeline, objective, readings)
    rng = np.random.default_rng((seed, 2))
    pairs: list[Edge] = [(i, j) for i, j in timeline.exchange_edge.tolist()]
    workers = timeline.gradient_worker.tolist()
    for now_s, kind, number in _events(timeline):
        reader.read(before_s=now_s)
        if kind == GRADIENT:
            if objective is not None:
                worker = workers[number]
                seen = replicas.points[worker]
                step = objective.gradient(worker, seen, rng) * -learning_rate
                replicas.update(worker, step, now_s)
        elif kind == AT_ONCE:
            replicas.exchange(*pairs[number], now_s)
        elif kind == MEET:
            replicas.meet(number, *pairs[number], now_s)
        else:
            replicas.land(number, *pairs[number], now_s)
    reader.read(before_s=math.inf)
    return reader.course()


class _Event(NamedTuple):
    at_s: float
    kind: int
    number: int


def _events(timeline: Timeline) -> Iterator[_Event]:
    """Gradients, beginnings and ends of exchanges in the order of time."""
    at_once = timeline.exchange_start_s == timeline.exchange_end_s
    number = np.arange(len(at_once))
    rows = [
        (timeline.gradient_end_s, GRADIENT, np.arange(len(timeline.gradient_worker))),
        (timeline.exchange_end_s[~at_once], LAND, number[~at_once]),
        (timeline.exchange_start_s[~at_once], MEET, number[~at_once]),
        (timeline.exchange_end_s[at_once], AT_ONCE, number[at_once]),
    ]
    at_s = np.concatenate([row[0] for row in rows])
    kinds = np.concatenate([np.full(len(row[0]), row[1]) for row in rows])
    numbers = np.concatenate([row[2] for row in rows])
    order = np.lexsort((numbers, kinds, at_s))
    columns = (column[order].tolist() for column in (at_s, kinds, numbers))
    return map(_Event, *columns)


class _Replicas:
    """x and x~ of all workers, each as they were at the worker's last event."""

    def __init__(self, x: Matrix, constants: Constants, unit_s: Matrix, order: Order) -> None:
        self.x, self.tilde, self.points = x.copy(), x.copy(), x.copy()
        self.mean = x.mean(axis=0)  # as it should be
        self._c, self._order = constants, order
        self._unit_s: list[float] = unit_s.tolist()
        self._at_s = [0.0] * len(x)
        self._found: dict[int, tuple[Matrix, float]] = {}  # differences on their way, since when

    def at(self, now_s: float) -> Matrix:
        """x of all workers mixed to one time, which changes nothing."""
        passed = (now_s - np.array(self._at_s)) / np.array(self._unit_s)
        share = -np.expm1(-2 * self._c.eta * passed) / 2
        return self.x + share[:, None] * (self.tilde - self.x)

    def update(self, worker: int, step: Matrix, now_s: float) -> None:
        """A gradient event; the next gradient is taken at the point that it leaves."""
        self._mix(worker, now_s)
        self.x[worker] += step
        self.tilde[worker] += step
        self.mean += step / len(self.x)
        self.points[worker] = self.x[worker]

    def exchange(self, i: int, j: int, now_s: float) -> None:
        """One that takes no time."""
        if self._order == "before_mixing":
            self.meet(-1, i, j, now_s)
            self.land(-1, i, j, now_s)
            return
        self._mix(i, now_s)
        self._mix(j, now_s)
        m = self.x[i] - self.x[j]
        part, part_tilde = self._c.alpha * m, self._c.alpha_tilde * m
        self.x[i] -= part
        self.x[j] += part
        self.tilde[i] -= part_tilde
        self.tilde[j] += part_tilde

    def meet(self, number: int, i: int, j: int, now_s: float) -> None:
        """An exchange begins: both ends learn how far they are apart."""
        if self._order == "after_mixing":
            self._mix(i, now_s)
            self._mix(j, now_s)
        self._found[number] = self.x[i] - self.x[j], now_s

    def land(self, number: int, i: int, j: int, now_s: float) -> None:
        """It ends; its effect is that of the time at which it began, mixed since then."""
        found, since_s = self._found.pop(number)
        for worker, m in ((i, found), (j, -found)):
            self._mix(worker, now_s)
            share = self._share((now_s - since_s) / self._unit_s[worker])
            towards = share * (self._c.alpha_tilde - self._c.alpha)
            self.x[worker] -= (self._c.alpha + towards) * m
            self.tilde[worker] -= (self._c.alpha_tilde - towards) * m

    def _mix(self, worker: int, now_s: float) -> None:
        share = self._share((now_s - self._at_s[worker]) / self._unit_s[worker])
        self._at_s[worker] = now_s
        if share:
            moved = share * (self.tilde[worker] - self.x[worker])
            self.x[worker] += moved
            self.tilde[worker] -= moved

    def _share(self, units: float) -> float:
        """Of the difference, that x and x~ each take over."""
        return -math.expm1(-2 * self._c.eta * units) / 2


class _Reader:
    """Readings at equal steps of time."""

    def __init__(
        self, replicas: _Replicas, timeline: Timeline, objective: Quadratic | None, count: int
    ) -> None:
        self._replicas, self._objective = replicas, objective
        self._unit_s = timeline.unit_s
        self._at_s: list[float] = np.linspace(0, timeline.end_s, max(count, 2)).tolist()
        self._size = math.sqrt(float((replicas.x**2).sum(axis=1).mean())) or 1.0
        self._rows: list[tuple[float, float, float]] = []
        self._x = replicas.x

    def read(self, before_s: float) -> None:
        """All readings that are due before this time."""
        while len(self._rows) < len(self._at_s) and self._at_s[len(self._rows)] < before_s:
            self._x = x = self._replicas.at(self._at_s[len(self._rows)])
            mean = x.mean(axis=0)
            distance = float(((x - mean) ** 2).sum() / len(x))
            drift = float(np.linalg.norm(mean - self._replicas.mean)) / self._size
            excess = 0.0 if self._objective is None else self._objective.excess(x)
            self._rows.append((distance, drift, excess))

    def course(self) -> Course:
        distance, drift, excess = np.array(self._rows).T
        return Course(np.array(self._at_s) / self._unit_s, distance, drift, excess, self._x)
