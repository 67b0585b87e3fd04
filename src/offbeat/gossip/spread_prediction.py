"""Prediction of gossip: workers never wait for each other, so each timeline is its own compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS, Prediction
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.separate_workers import compute_seconds, server_of
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.gossip.prediction import message_bytes, pair_stats

if TYPE_CHECKING:
    from offbeat.gossip.strategies import Gossip


def predict_gossip(
    strategy: Gossip,
    profile: Profile,
    *,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Prediction:
    """Predict gossip. The duration of an iteration is the compute time of the slowest worker.

    The link carries the bytes of all exchanges at the full rate. If these take longer than an
    iteration, the link is busy for the whole iteration and fewer exchanges happen.
    """
    ranks = ranks or Ranks()
    ranks.fit(profile)
    least = RANDOM_ITERATIONS if any(ranks.jitters(profile)) else LEAST_ITERATIONS
    count = max(iterations or 0, least)
    scale = np.array(ranks.compute_scale(profile))
    compute_s = compute_seconds(profile, ranks, count, seed) + profile.update_s * scale
    ends_s = compute_s.cumsum(axis=0)
    iteration_s = float(ends_s[-1].max()) / count
    server = server_of(profile, 1)
    size_bytes = message_bytes(strategy, profile)
    busy_s = min(strategy.rate * size_bytes / server.rate, iteration_s)
    link = profile.default_link.name
    return Prediction(
        strategy=str(strategy),
        iteration_s=iteration_s,
        bound_s=strategy.bound_s(profile),
        exposed_s=0.0,
        idle_s={link: iteration_s - busy_s},
        busy_s={link: busy_s},
        bytes_per_iteration={link: busy_s * server.rate},
        window=range(count),
        steady=False,
        plan=None,
        _traced=lambda: _trace(
            strategy, profile, compute_s, ends_s, _notes(strategy, profile, ranks, seed)
        ),
    )


def _trace(
    strategy: Gossip,
    profile: Profile,
    compute_s: NDArray[np.float64],
    ends_s: NDArray[np.float64],
    notes: dict[str, Any],
) -> Trace:
    """Return one row per worker. Forward includes other time before it, backward includes the
    update.
    """
    count, workers = ends_s.shape
    before_s = profile.other_s + profile.forward_s
    share = before_s / (before_s + profile.backward_s + profile.update_s)
    spans = []
    for n in range(min(workers, MAX_RANKS)):
        for i in range(max(count - LEAST_ITERATIONS, 0), count):
            end, took = float(ends_s[i, n]), float(compute_s[i, n])
            turn = end - (1 - share) * took
            spans.append(Span(n, COMPUTE, "forward", i, end - took, turn))
            spans.append(Span(n, COMPUTE, "backward", i, turn, end))
    return Trace(
        source="simulated",
        strategy=str(strategy),
        ends_s=tuple(map(tuple, ends_s.T.tolist())),
        starts_s=(0.0,) * workers,
        spans=tuple(spans),
        notes=notes,
        uneven=True,
    )


def _notes(strategy: Gossip, profile: Profile, ranks: Ranks, seed: int) -> dict[str, Any]:
    """Return the number of workers and, for at least two, the simulated exchanges."""
    workers = profile.world_size
    said = {"gossip": pair_stats(strategy, profile, ranks, seed)} if workers > 1 else {}
    return {"ranks": workers, **said}
