"""Selective synchronization over servers in virtual time: votes, and means after a yes.

A vote is a barrier: all workers hear of its outcome at once. So after every yes they push and pull
side by side, and that takes the same time whenever it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.profile import Profile
from offbeat.sim.outcomes import Outcomes, Votes
from offbeat.sim.pipe import Pipe
from offbeat.sim.prediction import RANDOM_ITERATIONS, Prediction
from offbeat.sim.ranks import Ranks
from offbeat.sim.served import (
    CLOCKS,
    Course,
    Server,
    compute_seconds,
    require_servers,
    server_of,
    spans_of,
)
from offbeat.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.trace import Trace

if TYPE_CHECKING:
    from offbeat.strategies.ps_selsync import PSSelSync


def run_selective(server: Server, compute_s: NDArray[np.float64], yes: Sequence[bool]) -> Course:
    """Workers of `compute_s[iteration, worker]` seconds, and what their votes decide."""
    exchange_s = _exchange_s(server)
    begin_s = np.zeros(compute_s.shape[1])
    begins, computed, ends = [], [], []
    for own_s, synchronous in zip(compute_s, yes, strict=True):
        done_s = begin_s + own_s
        heard_s = done_s.max() + 2 * server.latency_s
        end_s = heard_s + (exchange_s if synchronous else np.zeros_like(exchange_s))
        begins.append(begin_s)
        computed.append(done_s)
        ends.append(end_s)
        begin_s = end_s
    return Course(*(np.array(rows).T.tolist() for rows in (begins, computed, ends)))


def _exchange_s(server: Server) -> NDArray[np.float64]:
    """Of every worker: seconds until it has the mean, if all begin to push at once. The servers
    add up what arrives, which takes them no time here."""
    caps, all_s = np.array(server.caps), np.zeros(len(server.caps))
    pipe = Pipe(caps, server.rate)
    for worker in range(len(caps)):
        pipe.start(worker, server.size_bytes, 0.0)
    for _ in caps:
        at_s, worker = pipe.next_end()
        pipe.end(worker, at_s)
        all_s[worker] = at_s
    return all_s.max() + all_s + 2 * server.latency_s  # inwards, then outwards at the same rates


def predict_selective(
    strategy: PSSelSync,
    profile: Profile,
    *,
    servers: int = 1,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    votes: Votes | None = None,
) -> Prediction:
    """Prediction of a job with so many servers beside the profile's workers; rates as in
    `predict_served`, `votes` as of `simulate`. `exposed_s` is waiting for votes and means."""
    require_servers(servers, strategy)
    ranks, votes = ranks or Ranks(), votes or {}
    ranks.fit(profile)
    name = strategy.votes[0]
    outcomes, given = Outcomes(strategy.votes, votes, seed), votes.get(name, 1.0)
    drawn = not isinstance(given, Sequence) and 0 < given < 1
    chance = drawn or any(ranks.jitters(profile))
    replayed = len(given) if isinstance(given, Sequence) else 0
    if replayed:
        count = iterations or replayed
    else:
        count = max(iterations or 0, RANDOM_ITERATIONS if chance else CLOCKS)
    scale = np.array(ranks.compute_scale(profile))
    compute_s = compute_seconds(profile, ranks, count, seed) + profile.update_s * scale
    yes = [outcomes.yes(name, i) for i in range(count)]
    server = server_of(profile, servers, ranks)
    course = run_selective(server, compute_s, yes)
    return _prediction(strategy, profile, course, compute_s, yes, server)


def _prediction(
    strategy: PSSelSync,
    profile: Profile,
    course: Course,
    compute_s: NDArray[np.float64],
    yes: Sequence[bool],
    server: Server,
) -> Prediction:
    count, workers = compute_s.shape
    iteration_s = course.seconds / count
    share = sum(yes) / count
    busy_s = share * server.size_bytes / min(fmean(server.caps), server.rate)
    link = profile.default_link.name
    size_bytes = sum(bucket.size_bytes for bucket in profile.buckets)
    return Prediction(
        strategy=str(strategy),
        iteration_s=iteration_s,
        bound_s=strategy.bound_s(strategy.costed(profile)),
        exposed_s=max(iteration_s - float(compute_s.mean()), 0.0),
        idle_s={link: max(iteration_s - busy_s, 0.0)},
        busy_s={link: busy_s},
        bytes_per_iteration={link: share * size_bytes},
        window=range(count),
        steady=False,
        plan=None,
        _traced=lambda: _trace(strategy, course, workers),
    )


def _trace(strategy: PSSelSync, course: Course, workers: int) -> Trace:
    last = len(course.ends_s[0])
    recorded = range(max(last - LEAST_ITERATIONS, 0), last)
    spans = [span for n in range(min(workers, MAX_RANKS)) for span in spans_of(course, n, recorded)]
    return Trace(
        source="simulated",
        strategy=str(strategy),
        ends_s=tuple(map(tuple, course.ends_s)),
        starts_s=(0.0,) * workers,
        spans=tuple(spans),
        notes={"ranks": workers},
        uneven=True,
    )
