"""Discrete-event simulation of workers with parameter servers.

All servers are alike and hold equal shares of the parameters, so the simulation has one of them.
The flow of each worker to this server has the server's share of the worker's bytes and rate. All
pushes share the server's incoming rate and all pulls its outgoing rate (incast). Flows that began
earlier have slightly larger shares. A push is limited by the rate at which its worker sends, a pull
by the rate at which it receives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS, Conditions, Prediction
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.sessions.separate_workers import Server, compute_seconds, server_of

if TYPE_CHECKING:
    from offbeat.server.strategies import SSP

CLOCKS = 200  # simulated clocks if compute times have no jitter
REPLAYS = 8  # most simulations of the iterations that a job has run, whose mean is predicted
LEAST_JITTER = 0.01  # relative standard deviation of compute
LEAST_RATE = 1e-300  # bytes per second; avoids a division by 0
LEAST_WEIGHT = 1e-6  # of a flow, relative to the flow that began first


class Pipe:
    """Flows of bytes, at most one per worker, with weighted max-min fair rates.

    A flow is limited by its worker's entry in `caps`, their sum by `capacity` (bytes/s). In the
    order in which the present flows began, each has `later_share` times the weight of the previous
    one.
    """

    def __init__(self, caps: Sequence[float], capacity: float, later_share: float = 1.0):
        self._caps, self._capacity, self._later_share = caps, capacity, later_share
        self._left: dict[int, float] = {}  # bytes by worker with a flow, in order of their begin
        self._rates: dict[int, float] = {}
        self._next: tuple[float, int] = (math.inf, -1)
        self._now_s = 0.0
        self.busy_s = 0.0

    def start(self, worker: int, size_bytes: float, now_s: float) -> None:
        """Start a flow of `size_bytes` for a worker without a flow."""
        self._advance(now_s)
        self._left[worker] = size_bytes
        self._share()

    def end(self, worker: int, now_s: float) -> None:
        """End a worker's flow at the time that `next_end` has returned."""
        self._advance(now_s)
        del self._left[worker]
        self._share()

    def next_end(self) -> tuple[float, int]:
        """Return the end of the next flow in seconds and its worker; (inf, -1) without flows."""
        return self._next

    def _advance(self, now_s: float) -> None:
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        if self._left:
            for worker, rate in self._rates.items():
                self._left[worker] -= rate * elapsed_s
            self.busy_s += elapsed_s

    def _share(self) -> None:
        """Set the rates that hold from now on, and the end of the next flow."""
        weights = [max(self._later_share**n, LEAST_WEIGHT) for n in range(len(self._left))]
        shares = fair_shares([self._caps[worker] for worker in self._left], weights, self._capacity)
        self._rates = dict(zip(self._left, shares, strict=True))
        ends_s = (
            (self._left[worker] / max(rate, LEAST_RATE), worker)
            for worker, rate in self._rates.items()
        )
        left_s, worker = min(ends_s, default=(math.inf, -1))
        self._next = self._now_s + max(left_s, 0.0), worker


def fair_shares(caps: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """Return the weighted max-min fair rates of flows: in proportion to the weights, none above its
    cap."""
    total = sum(weights)
    if all(w * capacity <= cap * total for cap, w in zip(caps, weights, strict=True)):
        return [capacity * w / total for w in weights]
    order = sorted(range(len(caps)), key=lambda n: caps[n] / weights[n])
    rates, left = [0.0] * len(caps), capacity
    totals = list(accumulate(weights[n] for n in reversed(order)))  # of the last flows in `order`
    for n, total in zip(order, reversed(totals), strict=True):
        rates[n] = min(caps[n], left * weights[n] / total)
        left -= rates[n]
    return rates


@dataclass(slots=True)
class WorkerState:
    """State of a worker. Its clock is the number of its next push."""

    clock: int = 0
    low: int = 0  # its parameters include all pushes of lower clocks
    pulling: int | None = None  # smallest version that answers the pull under way
    parked: bool = False  # the pull waits on the server for that version
    answered: int = 0  # version in the server's answer
    arrived: int | None = None  # version that has arrived and is not in use yet
    pushing: bool = False  # a push is under way
    pull_follows: bool = False  # request the pull when the push has arrived
    ready: bool = False  # has computed its gradients, and waits for the previous push
    waiting: bool = False  # waits for parameters
    taken: int = 0  # its pushes that have arrived at the server


@dataclass
class Timeline:
    """Times of a simulation, per worker and clock.

    `begins_s` and `computed_s` are start and end of compute. `ends_s` is the start of the push,
    with which the next clock begins.
    """

    begins_s: list[list[float]]
    computed_s: list[list[float]]
    ends_s: list[list[float]]
    staleness: list[int] = field(default_factory=list)  # clock - low at every begin

    @property
    def seconds(self) -> float:
        """End of the last clock of the slowest worker."""
        return max(ends[-1] for ends in self.ends_s)


def run_served(
    server: Server, compute_s: NDArray[np.float64], s: int, *, each_push: bool = False
) -> Timeline:
    """Simulate workers with compute times `compute_s` [clocks, workers] and staleness bound `s`.

    With `each_push` the server steps at each push, otherwise once per clock.
    """
    return ServedJob(server, compute_s, s, each_push).run()


class ServedJob:
    """Event queue, pipes and worker states of one simulation."""

    def __init__(
        self, server: Server, compute_s: NDArray[np.float64], s: int, each_push: bool
    ) -> None:
        self._server, self._compute_s = server, compute_s
        self._s, self._each_push = s, each_push
        self._clocks, workers = compute_s.shape
        self._workers = [WorkerState() for _ in range(workers)]
        self._inwards = Pipe(server.caps, server.rate, server.later_share)
        sends = server.rate if server.send_rate is None else server.send_rate
        self._outwards = Pipe(server.receive_caps or server.caps, sends, server.later_share)
        self._events: list[tuple[float, int, str, int]] = []
        self._count = 0
        self._cpu_free_s = 0.0
        self._version = 0
        self.timeline = Timeline(
            _empty_lists(workers), _empty_lists(workers), _empty_lists(workers)
        )

    def run(self) -> Timeline:
        for n in range(len(self._workers)):
            self._begin(n, 0.0)
        while True:
            event_s = self._events[0][0] if self._events else math.inf
            in_s, pusher = self._inwards.next_end()
            out_s, puller = self._outwards.next_end()
            now_s = min(event_s, in_s, out_s)
            if math.isinf(now_s):
                return self.timeline
            if now_s == event_s:
                _, _, what, n = heapq.heappop(self._events)
                getattr(self, f"_{what}")(n, now_s)
            elif now_s == in_s:
                self._inwards.end(pusher, now_s)
                self._schedule_event(now_s + self._server.latency_s, "receive_push", pusher)
            else:
                self._outwards.end(puller, now_s)
                self._schedule_event(now_s + self._server.latency_s, "receive_parameters", puller)

    def _schedule_event(self, at_s: float, what: str, n: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, what, n))

    # ---- a worker ---------------------------------------------------------------------------

    def _begin(self, n: int, now_s: float) -> None:
        """Begin to compute the next clock, or wait for parameters that are new enough."""
        worker = self._workers[n]
        if worker.clock == self._clocks:
            return
        self._load_arrived(n)
        if worker.pulling is None:
            self._pull(n, now_s)
        self._compute_if_new_enough(n, now_s)

    def _compute_if_new_enough(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        worker.waiting = worker.low < worker.clock - self._s
        if not worker.waiting:
            self._compute(n, now_s, worker.clock - worker.low)

    def _compute(self, n: int, now_s: float, staleness: int) -> None:
        worker = self._workers[n]
        worker.waiting = False
        self.timeline.staleness.append(staleness)
        self.timeline.begins_s[n].append(now_s)
        self._schedule_event(now_s + float(self._compute_s[worker.clock, n]), "end_compute", n)

    def _load_arrived(self, n: int) -> None:
        worker = self._workers[n]
        if worker.arrived is not None:
            worker.low, worker.arrived = max(worker.low, worker.arrived), None

    def _pull(self, n: int, now_s: float) -> None:
        """Request parameters. The server receives the request after the push under way."""
        worker = self._workers[n]
        worker.pulling = max(worker.clock - self._s, 0)
        worker.pull_follows = worker.pushing
        if not worker.pushing:
            self._schedule_event(now_s + self._server.latency_s, "receive_pull", n)

    def _end_compute(self, n: int, now_s: float) -> None:
        self.timeline.computed_s[n].append(now_s)
        worker = self._workers[n]
        if worker.pushing:
            worker.ready = True
        else:
            self._push(n, now_s)

    def _push(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        worker.ready, worker.pushing = False, True
        worker.clock += 1
        self.timeline.ends_s[n].append(now_s)
        self._inwards.start(n, self._server.size_bytes, now_s)
        self._begin(n, now_s)

    def _receive_parameters(self, n: int, now_s: float) -> None:
        """Parameters arrive at a worker, which uses them from the start of its next clock."""
        worker = self._workers[n]
        worker.pulling, worker.arrived = None, worker.answered
        if worker.waiting:
            self._resume(n, now_s)

    def _resume(self, n: int, now_s: float) -> None:
        """Load the parameters that a worker has waited for. It pulls again only if they are too
        old: other pulls begin with a clock."""
        self._load_arrived(n)
        self._compute_if_new_enough(n, now_s)
        if self._workers[n].waiting:
            self._pull(n, now_s)

    # ---- the server -------------------------------------------------------------------------

    def _receive_push(self, n: int, now_s: float) -> None:
        """A push arrives at the server."""
        worker = self._workers[n]
        worker.pushing = False
        worker.taken += 1
        if self._each_push or min(w.taken for w in self._workers) > self._version:
            self._cpu_free_s = max(self._cpu_free_s, now_s) + self._server.apply_s
            self._schedule_event(self._cpu_free_s, "end_apply", 0)
        if worker.pull_follows:
            worker.pull_follows = False
            self._schedule_event(now_s, "receive_pull", n)
        if worker.ready:
            self._push(n, now_s)

    def _end_apply(self, n: int, now_s: float) -> None:
        low = min(worker.taken for worker in self._workers)
        if low > self._version:
            self._version = low
            for other, worker in enumerate(self._workers):
                if worker.parked:
                    self._answer(other, now_s)

    def _receive_pull(self, n: int, now_s: float) -> None:
        self._workers[n].parked = True
        self._answer(n, now_s)

    def _answer(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        assert worker.pulling is not None
        if self._version >= worker.pulling:
            worker.parked = False
            worker.answered = self._version
            self._outwards.start(n, self._server.size_bytes, now_s)


def _empty_lists(workers: int) -> list[list[float]]:
    return [[] for _ in range(workers)]


# ---- from a profile -------------------------------------------------------------------------


def predict_served(strategy: SSP, profile: Profile, conditions: Conditions) -> Prediction:
    """Predict a job with the profile's workers and additional hosts that serve.

    The profile's rate of the default link is that of an all-reduce, which moves 2(N-1)/N of its
    bytes through every host in 2(N-1) hops. A push or pull moves all bytes in one hop. `exposed_s`
    of the result is the waiting time for parameters and for the arrival of the previous push.

    Workers begin in step. Workers that may be at different clocks do not stay in step. Therefore
    the prediction for the iterations that a job has run (`conditions.skip` is above 0) is the mean
    of several simulations of their clocks. Its trace is that of the first simulation.
    """
    ranks, servers = conditions.ranks or Ranks(), conditions.servers
    if servers < 1:
        raise ValueError(f"servers ({servers}) must be at least 1 for {strategy}")
    ranks.fit(profile)
    server, iterations = server_of(profile, servers, ranks), conditions.iterations or 0
    replays = 1
    if conditions.skip and iterations:
        clocks = max(iterations // strategy.accumulate, 1)
        first = min(-(-conditions.skip // strategy.accumulate), clocks - 1)
        replays = min(max(CLOCKS // clocks, 1), REPLAYS)
    else:
        chance = any(ranks.jitters(profile))
        most = max(iterations, RANDOM_ITERATIONS if chance else CLOCKS)
        clocks = -(-most // strategy.accumulate)
        first = clocks // 2
    found = [
        _prediction(
            strategy,
            profile,
            *simulate_served(strategy, profile, ranks, server, clocks, conditions.seed + replay),
            server,
            first,
        )
        for replay in range(replays)
    ]
    iteration_s = fmean(one.iteration_s for one in found)
    return replace(
        found[0],
        iteration_s=iteration_s,
        exposed_s=fmean(one.exposed_s for one in found),
        idle_s={link: iteration_s - busy_s for link, busy_s in found[0].busy_s.items()},
    )


def simulate_served(
    strategy: SSP, profile: Profile, ranks: Ranks, server: Server, clocks: int, seed: int
) -> tuple[Timeline, NDArray[np.float64]]:
    """Simulate `clocks` clocks of a job. Return the timeline and the compute seconds `[clock,
    worker]`.

    Workers that may be at different clocks have at least `LEAST_JITTER`: exactly equal ones would
    stay in step for longer than real ones, push and then pull all at once, and leave each direction
    of the server's link idle for half of the time.
    """
    if strategy.s > 0 and max(ranks.jitters(profile), default=0.0) < LEAST_JITTER:
        ranks = replace(ranks, jitter=LEAST_JITTER)
    compute_s = compute_seconds(profile, ranks, clocks * strategy.accumulate, seed)
    per_clock_s = compute_s.reshape(clocks, strategy.accumulate, -1).sum(axis=1)
    timeline = run_served(server, per_clock_s, strategy.s, each_push=strategy.apply == "push")
    return timeline, per_clock_s


def _prediction(
    strategy: SSP,
    profile: Profile,
    timeline: Timeline,
    compute_s: NDArray[np.float64],
    server: Server,
    first: int,
) -> Prediction:
    """Return the prediction for the clocks from `first` on."""
    clocks, workers = compute_s.shape
    ends_s = np.array(timeline.ends_s)
    whole_s = float(ends_s[:, -1].max() - ends_s[:, first - 1].max()) if first else timeline.seconds
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
        _traced=lambda: _trace(strategy, timeline, workers, first),
    )


def _trace(strategy: SSP, timeline: Timeline, workers: int, first: int) -> Trace:
    """Return a trace with one row per worker, with spans of the last clocks from `first` on.

    The iterations of a clock have equal lengths.
    """
    last = len(timeline.ends_s[0])
    spans = [
        span
        for n in range(min(workers, MAX_RANKS))
        for span in spans_of(timeline, n, range(max(last - LEAST_ITERATIONS, first), last))
    ]
    return Trace(
        source="simulated",
        strategy=str(strategy),
        ends_s=tuple(tuple(_split(ends, strategy.accumulate)) for ends in timeline.ends_s),
        starts_s=(0.0,) * workers,
        spans=tuple(spans) if strategy.accumulate == 1 else (),
        notes={"ranks": workers, "staleness": fmean(timeline.staleness)},
        uneven=strategy.s > 0,
    )


def _split(ends_s: list[float], parts: int) -> Iterator[float]:
    before_s = 0.0
    for end_s in ends_s:
        yield from (before_s + (end_s - before_s) * (k + 1) / parts for k in range(parts))
        before_s = end_s


def spans_of(timeline: Timeline, n: int, clocks: range) -> Iterator[Span]:
    """Yield the compute and wait spans of worker `n` in these clocks."""
    for clock in clocks:
        begin_s, computed_s = timeline.begins_s[n][clock], timeline.computed_s[n][clock]
        before_s = timeline.ends_s[n][clock - 1] if clock else 0.0
        if begin_s > before_s:
            yield Span(n, COMPUTE, "wait", clock, before_s, begin_s)
        yield Span(n, COMPUTE, "backward", clock, begin_s, computed_s)
        if timeline.ends_s[n][clock] > computed_s:
            yield Span(n, COMPUTE, "wait", clock, computed_s, timeline.ends_s[n][clock])
