"""Served: workers and their parameter servers in virtual time, event by event.

All servers are alike and hold equal shares, so one of them stands for all: every worker's flow to
it has that share of the bytes and of the worker's own rate. Pushes come in and parameters go out at
the server's rate, shared by all workers (incast).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS, Prediction
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.separate_workers import Server, compute_seconds, server_of
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.server.pipe import Pipe

if TYPE_CHECKING:
    from offbeat.server.ssp import SSP

CLOCKS = 200  # without jitter


@dataclass(slots=True)
class _Worker:
    """Where a worker is. A clock is the number of its next push."""

    clock: int = 0
    low: int = 0  # every push of a smaller clock is in its parameters
    pulling: int | None = None  # the least clock that it asked for
    parked: bool = False  # and that the server does not have yet
    answered: int = 0
    arrived: int | None = None
    pushing: bool = False
    pull_follows: bool = False  # the pull waits behind the push
    ready: bool = False  # computed, and waits for its last push to be in
    waiting: bool = False  # for parameters
    since_s: float = 0.0
    taken: int = 0  # what the server has of it


@dataclass
class Course:
    """What happened: per worker and clock when it began to compute, when that was done, and when
    it was over (the push had been handed over); seconds waited by cause."""

    begins_s: list[list[float]]
    computed_s: list[list[float]]
    ends_s: list[list[float]]
    staleness: list[int] = field(default_factory=list)  # clock - low at every begin
    pulls: int = 0
    busy_s: float = 0.0  # of the server's link inwards

    @property
    def seconds(self) -> float:
        """Until the last worker's last end."""
        return max(ends[-1] for ends in self.ends_s)


def run_served(
    server: Server, compute_s: NDArray[np.float64], s: int, *, each_push: bool = False
) -> Course:
    """Workers of `compute_s[clock, worker]` seconds per clock and a staleness of `s`. `each_push`:
    every push is an update, not every clock."""
    return _Job(server, compute_s, s, each_push).run()


class _Job:
    """The events of one simulation, and the state of all workers."""

    def __init__(
        self, server: Server, compute_s: NDArray[np.float64], s: int, each_push: bool
    ) -> None:
        self._server, self._compute_s = server, compute_s
        self._s, self._each_push = s, each_push
        self._clocks, workers = compute_s.shape
        self._workers = [_Worker() for _ in range(workers)]
        caps = np.array(server.caps)
        self._inwards, self._outwards = Pipe(caps, server.rate), Pipe(caps, server.rate)
        self._events: list[tuple[float, int, str, int]] = []
        self._count = 0
        self._cpu_free_s = 0.0
        self._version = 0
        self.course = Course(_empty(workers), _empty(workers), _empty(workers))

    def run(self) -> Course:
        for n in range(len(self._workers)):
            self._begin(n, 0.0)
        while True:
            event_s = self._events[0][0] if self._events else math.inf
            in_s, pusher = self._inwards.next_end()
            out_s, puller = self._outwards.next_end()
            now_s = min(event_s, in_s, out_s)
            if math.isinf(now_s):
                self.course.busy_s = self._inwards.busy_s
                return self.course
            if now_s == event_s:
                _, _, what, n = heapq.heappop(self._events)
                getattr(self, f"_{what}")(n, now_s)
            elif now_s == in_s:
                self._inwards.end(pusher, now_s)
                self._later(now_s + self._server.latency_s, "reached", pusher)
            else:
                self._outwards.end(puller, now_s)
                self._later(now_s + self._server.latency_s, "arrive", puller)

    def _later(self, at_s: float, what: str, n: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, what, n))

    # ---- a worker ---------------------------------------------------------------------------

    def _begin(self, n: int, now_s: float) -> None:
        """Go on with the next clock, if parameters are new enough."""
        worker = self._workers[n]
        if worker.clock == self._clocks:
            return
        self._refresh(n, now_s)
        if worker.low < worker.clock - self._s:
            worker.waiting = True
            return
        worker.waiting = False
        self.course.staleness.append(worker.clock - worker.low)
        self.course.begins_s[n].append(now_s)
        self._later(now_s + float(self._compute_s[worker.clock, n]), "computed", n)

    def _refresh(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        if worker.arrived is not None:
            worker.low, worker.arrived = max(worker.low, worker.arrived), None
        if worker.pulling is None:
            worker.pulling = max(worker.clock - self._s, 0)
            self.course.pulls += 1
            worker.pull_follows = worker.pushing
            if not worker.pushing:
                self._later(now_s + self._server.latency_s, "asked", n)

    def _computed(self, n: int, now_s: float) -> None:
        self.course.computed_s[n].append(now_s)
        worker = self._workers[n]
        if worker.pushing:
            worker.ready = True
        else:
            self._push(n, now_s)

    def _push(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        worker.ready, worker.pushing = False, True
        worker.clock += 1
        self.course.ends_s[n].append(now_s)
        self._inwards.start(n, self._server.size_bytes, now_s)
        self._begin(n, now_s)

    def _arrive(self, n: int, now_s: float) -> None:
        """Parameters are here; they are used between two clocks."""
        worker = self._workers[n]
        worker.pulling, worker.arrived = None, worker.answered
        if worker.waiting:
            self._begin(n, now_s)

    # ---- the server -------------------------------------------------------------------------

    def _reached(self, n: int, now_s: float) -> None:
        """A push is in; the worker hears of it when it looks."""
        worker = self._workers[n]
        worker.pushing = False
        worker.taken += 1
        if self._each_push or min(w.taken for w in self._workers) > self._version:
            self._cpu_free_s = max(self._cpu_free_s, now_s) + self._server.apply_s
            self._later(self._cpu_free_s, "applied", n)
        if worker.pull_follows:
            worker.pull_follows = False
            self._later(now_s, "asked", n)
        if worker.ready:
            self._push(n, now_s)

    def _applied(self, n: int, now_s: float) -> None:
        low = min(worker.taken for worker in self._workers)
        if low > self._version:
            self._version = low
            for other, worker in enumerate(self._workers):
                if worker.parked:
                    self._answer(other, now_s)

    def _asked(self, n: int, now_s: float) -> None:
        self._workers[n].parked = True
        self._answer(n, now_s)

    def _answer(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        assert worker.pulling is not None
        if self._version >= worker.pulling:
            worker.parked = False
            worker.answered = self._version
            self._outwards.start(n, self._server.size_bytes, now_s)


def _empty(workers: int) -> list[list[float]]:
    return [[] for _ in range(workers)]


# ---- from a profile -------------------------------------------------------------------------


def predict_served(
    strategy: SSP,
    profile: Profile,
    *,
    servers: int = 1,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Prediction:
    """Prediction of a job with so many servers beside the profile's workers.

    The default link's rate is that of an all-reduce, which moves 2(N-1)/N of its bytes through
    every host in 2(N-1) hops; a push or pull moves all of them in one. `exposed_s` is waiting for
    parameters and for the last push to be in.
    """
    require_servers(servers, strategy)
    ranks = ranks or Ranks()
    ranks.fit(profile)
    chance = any(ranks.jitters(profile))
    most = max(iterations or 0, RANDOM_ITERATIONS if chance else CLOCKS)
    clocks = -(-most // strategy.accumulate)
    compute_s = compute_seconds(profile, ranks, clocks * strategy.accumulate, seed)
    per_clock_s = compute_s.reshape(clocks, strategy.accumulate, -1).sum(axis=1)
    server = server_of(profile, servers, ranks)
    course = run_served(server, per_clock_s, strategy.s, each_push=strategy.apply == "push")
    return _prediction(strategy, profile, course, per_clock_s, server)


def require_servers(servers: int, strategy: object) -> None:
    """ValueError unless there is a server."""
    if servers < 1:
        raise ValueError(f"servers ({servers}) must be at least 1 for {strategy}")


def _prediction(
    strategy: SSP,
    profile: Profile,
    course: Course,
    compute_s: NDArray[np.float64],
    server: Server,
) -> Prediction:
    clocks, workers = compute_s.shape
    first = clocks // 2  # the second half
    ends_s = np.array(course.ends_s)
    whole_s = float(ends_s[:, -1].max() - ends_s[:, first - 1].max()) if first else course.seconds
    iterations = (clocks - first) * strategy.accumulate
    iteration_s = whole_s / iterations
    spent_s = ends_s[:, -1] - (ends_s[:, first - 1] if first else 0.0)
    exposed_s = float((spent_s - compute_s[first:].sum(axis=0)).mean()) / iterations
    own_s = server.size_bytes / min(fmean(server.caps), server.rate)
    link = profile.default_link.name
    busy_s = min(own_s / strategy.accumulate, iteration_s)
    return Prediction(
        strategy=str(strategy),
        iteration_s=iteration_s,
        bound_s=strategy.bound_s(profile),
        exposed_s=max(exposed_s, 0.0),
        idle_s={link: iteration_s - busy_s},
        busy_s={link: busy_s},
        bytes_per_iteration={
            link: sum(bucket.size_bytes for bucket in profile.buckets) / strategy.accumulate
        },
        window=range(first * strategy.accumulate, clocks * strategy.accumulate),
        steady=False,
        plan=None,
        _traced=lambda: _trace(strategy, course, workers),
    )


def _trace(strategy: SSP, course: Course, workers: int) -> Trace:
    """One row per worker; an iteration is a clock's share of it."""
    last = len(course.ends_s[0])
    spans = [
        span
        for n in range(min(workers, MAX_RANKS))
        for span in spans_of(course, n, range(max(last - LEAST_ITERATIONS, 0), last))
    ]
    return Trace(
        source="simulated",
        strategy=str(strategy),
        ends_s=tuple(tuple(_split(ends, strategy.accumulate)) for ends in course.ends_s),
        starts_s=(0.0,) * workers,
        spans=tuple(spans) if strategy.accumulate == 1 else (),
        notes={"ranks": workers, "staleness": fmean(course.staleness)},
    )


def _split(ends_s: list[float], parts: int) -> Iterator[float]:
    before_s = 0.0
    for end_s in ends_s:
        yield from (before_s + (end_s - before_s) * (k + 1) / parts for k in range(parts))
        before_s = end_s


def spans_of(course: Course, n: int, clocks: range) -> Iterator[Span]:
    """What worker n did in these clocks."""
    for clock in clocks:
        begin_s, computed_s = course.begins_s[n][clock], course.computed_s[n][clock]
        before_s = course.ends_s[n][clock - 1] if clock else 0.0
        if begin_s > before_s:
            yield Span(n, COMPUTE, "wait", clock, before_s, begin_s)
        yield Span(n, COMPUTE, "backward", clock, begin_s, computed_s)
        if course.ends_s[n][clock] > computed_s:
            yield Span(n, COMPUTE, "wait", clock, computed_s, course.ends_s[n][clock])
