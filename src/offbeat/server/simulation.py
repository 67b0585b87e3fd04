"""Simulation of workers with parameter servers, on the clocks of real servers.

All servers are alike and hold equal shares of the parameters, so the simulation has one of them.
The stream of each worker to this server has the server's share of the worker's bytes and rate. All
pushes share the server's incoming rate and all pulls its outgoing rate (incast). Streams that began
earlier have slightly larger shares. A push is limited by the rate at which its worker sends, a pull
by the rate at which it receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS, Conditions, Prediction
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.server.clocks import Clocks
from offbeat.sessions.kernel import Inbox, Kernel, Port, Process, Stream
from offbeat.sessions.separate_workers import Server, compute_seconds, server_of

if TYPE_CHECKING:
    from offbeat.server.strategies import SSP

CLOCKS = 200  # simulated clocks if compute times have no jitter
REPLAYS = 8  # most simulations of the iterations that a job has run, whose mean is predicted
LEAST_JITTER = 0.01  # relative standard deviation of compute
PUSH, PULL = range(2)  # kinds of messages to the server


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


@dataclass
class _Worker:
    """Client of a worker: its inbox, and its push and pull under way."""

    inbox: Inbox
    low: int = 0  # its parameters include all pushes of lower clocks
    pushing: bool = False  # the server has not acknowledged the push
    pulling: bool = False  # a pull is under way, or has arrived and is not in use
    arrived: int | None = None  # clock of the parameters that have arrived

    def receive(self, clock: int | None) -> None:
        """Receive parameters of a clock, or the acknowledgement of the push (None)."""
        if clock is None:
            self.pushing = False
        else:
            self.arrived = clock


class ServedJob:
    """Workers and a server as processes, with the messages of `Client` and `Service`.

    Args:
        server: the server's share of the job.
        compute_s: compute seconds, [clocks, workers].
        s: staleness bound.
        each_push: whether the server steps at each push, otherwise once per clock.
    """

    def __init__(
        self, server: Server, compute_s: NDArray[np.float64], s: int, *, each_push: bool = False
    ) -> None:
        self.kernel = kernel = Kernel()
        self._server, self._compute_s = server, compute_s
        self._s, self._each_push = s, each_push
        self._clocks, self.workers = compute_s.shape
        self.clocks = Clocks(range(self.workers))
        self._inbox = Inbox(kernel)
        self._workers = [_Worker(Inbox(kernel)) for _ in range(self.workers)]
        sends = server.rate if server.send_rate is None else server.send_rate
        inwards, outwards = (Port(kernel, r, server.later_share) for r in (server.rate, sends))
        delay_s = server.latency_s
        self._to_server = [Stream(inwards, self._inbox.put, delay_s, cap) for cap in server.caps]
        self._to_workers = [
            Stream(outwards, worker.inbox.put, delay_s, cap)
            for worker, cap in zip(self._workers, server.receive_caps or server.caps, strict=True)
        ]
        begins_s, computed_s, ends_s = ([[] for _ in range(self.workers)] for _ in range(3))
        self.timeline = Timeline(begins_s, computed_s, ends_s)

    def run(self) -> Timeline:
        """Simulate all clocks."""
        for n in range(self.workers):
            self.kernel.spawn(self._work(n))
        self.kernel.spawn(self._serve())
        self.kernel.run()
        return self.timeline

    # ---- what happens; a subclass may do it on tensors --------------------------------------

    def begin(self, n: int, clock: int, low: int) -> None:
        """Worker `n` begins a clock with parameters that include all pushes of clocks < `low`."""
        self.timeline.staleness.append(clock - low)
        self.timeline.begins_s[n].append(self.kernel.now)

    def load(self, n: int) -> None:
        """Worker `n` loads the parameters that it has pulled."""

    def apply(self, n: int, clock: int) -> None:
        """The server takes a push of worker `n`."""
        self.clocks.advance(n, clock)

    def answer(self, n: int) -> None:
        """The server copies the parameters for worker `n`."""

    # ---- processes --------------------------------------------------------------------------

    def _work(self, n: int) -> Process:
        """Pull, compute and push each clock, as `SSPSession` does."""
        worker, times = self._workers[n], self.timeline
        self._pull(n, 0)
        for clock in range(self._clocks):
            self._load(n)
            while worker.low < clock - self._s:
                if not worker.pulling:
                    self._pull(n, clock - self._s)
                worker.receive((yield worker.inbox))
                self._load(n)
            self.begin(n, clock, worker.low)
            yield float(self._compute_s[clock, n])
            times.computed_s[n].append(self.kernel.now)
            for answer in worker.inbox.take_all():
                worker.receive(answer)
            while worker.pushing:
                worker.receive((yield worker.inbox))
            times.ends_s[n].append(self.kernel.now)
            worker.pushing = True
            self._to_server[n].send(self._server.size_bytes, (n, PUSH, clock))
            self._load(n)
            if not worker.pulling:
                self._pull(n, max(clock + 1 - self._s, 0))

    def _pull(self, n: int, need: int) -> None:
        self._workers[n].pulling = True
        self._to_server[n].send(0, (n, PULL, need))

    def _load(self, n: int) -> None:
        worker = self._workers[n]
        if worker.arrived is not None:
            self.load(n)
            worker.low = max(worker.low, worker.arrived)
            worker.pulling, worker.arrived = False, None

    def _serve(self) -> Process:
        """Handle one message after the other, as `Service` does; a step takes time."""
        needs: dict[int, int] = {}  # by worker: lowest clock that answers its pull
        while True:
            n, kind, clock = yield self._inbox
            if kind == PULL:
                needs[n] = clock
            else:
                before = self.clocks.lowest
                self.apply(n, clock)
                yield self._server.apply_s * (self._each_push or self.clocks.lowest - before)
                self._to_workers[n].send(0, None)
            for puller in sorted(n for n, need in needs.items() if need <= self.clocks.lowest):
                del needs[puller]
                self.answer(puller)
                self._to_workers[puller].send(self._server.size_bytes, int(self.clocks.lowest))


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
    job = ServedJob(server, per_clock_s, strategy.s, each_push=strategy.apply == "push")
    return job.run(), per_clock_s


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
