"""Servers in virtual time, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offbeat import SSP, Profile
from offbeat.core.strategy.interface import planned
from offbeat.profile import Bucket, Link
from offbeat.server.simulation import REPLAYS, ServedJob, Timeline
from offbeat.sessions.separate_workers import Server, compute_seconds, server_of
from offbeat.sim import Ranks, predict

CLOCKS = 60


def run_served(server: Server, compute_s: np.ndarray, s: int, **options: bool) -> Timeline:
    return ServedJob(server, compute_s, s, **options).run()


def steady_s(server: Server, compute_s: list[float], s: int, **options: bool) -> float:
    """Seconds per clock in the second half, by the slowest worker."""
    course = run_served(server, np.tile(compute_s, (CLOCKS, 1)), s, **options)
    ends = np.array(course.ends_s).max(axis=0)
    return float(ends[-1] - ends[CLOCKS // 2 - 1]) / (CLOCKS - CLOCKS // 2)


def test_nothing_on_the_network_costs_nothing() -> None:
    server = Server(1.0, 1e12, (1e12,) * 3)
    assert steady_s(server, [1.0, 1.0, 1.0], 0) == pytest.approx(1.0)
    assert steady_s(server, [1.0, 1.0, 2.0], 0) == pytest.approx(2.0)
    assert steady_s(server, [1.0, 1.0, 2.0], 3) == pytest.approx(2.0)


@pytest.mark.parametrize("workers", [1, 4])
def test_without_staleness_push_apply_and_pull_follow_each_other(workers: int) -> None:
    """compute + N M / R inwards + update + N M / R outwards, and a way there and back."""
    server = Server(10.0, 20.0, (20.0,) * workers, latency_s=0.05, apply_s=0.3)
    expected = 1.0 + workers * 0.5 + 0.05 + 0.3 + workers * 0.5 + 0.05
    assert steady_s(server, [1.0] * workers, 0) == pytest.approx(expected)


def test_rates_of_ranks_and_servers_are_relative_to_the_profile() -> None:
    ranks = Ranks(
        link_rates={"net": (1.0, 2.0, 1.0, 1.0)},
        receive_rates={"net": (4.0, 3.0, 4.0, 4.0)},
        server_rates={"net": (2.0, 8.0)},
    )
    facts = profile(4)
    ranks.fit(facts)
    alike, server = server_of(facts, 1), server_of(facts, 1, ranks)
    assert server.rate == 8 * alike.rate
    assert server.send_rate == 2 * alike.rate
    assert server.caps == tuple(alike.rate * x for x in (1, 2, 1, 1))
    assert server.receive_caps == tuple(alike.rate * x for x in (4, 3, 4, 4))
    assert (alike.send_rate, alike.receive_caps) == (alike.rate, alike.caps)
    with pytest.raises(ValueError, match="receive_rates"):
        Ranks(receive_rates={"net": (1.0,)}).fit(facts)
    with pytest.raises(ValueError, match="server_rates"):
        Ranks(server_rates={"net": (1.0, 0.0)})


def test_nobody_is_further_ahead_than_s() -> None:
    random = np.random.default_rng(1)
    for s in (0, 1, 5):
        compute_s = random.lognormal(0, 1, (CLOCKS, 5))
        course = run_served(Server(1.0, 5.0, (5.0,) * 5), compute_s, s)
        assert max(course.staleness) <= s
        begins = np.array(course.begins_s)
        ends = np.array(course.ends_s)
        for clock in range(s + 1, CLOCKS):  # nobody begins before all have ended clock - s - 1
            assert begins[:, clock].min() >= ends[:, clock - s - 1].max()


def profile(workers: int, **rest: float) -> Profile:
    buckets = (Bucket("a", 0.1, 0.2, 4000), Bucket("b", 0.1, 0.2, 4000))
    return Profile(buckets, (Link("net", 0.006, 1e5),), workers, **rest)


def test_from_a_profile() -> None:
    """An all-reduce of M on N hosts moves 2(N-1)/N M through each: so fast is a host."""
    server = server_of(profile(4), 2)
    assert server.rate == pytest.approx(1.5e5)
    assert server.caps == pytest.approx((0.75e5,) * 4)
    assert server.latency_s == pytest.approx(0.001)
    assert server.size_bytes == 4000
    distant = replace(profile(4), links=(Link("net", 0.24, 1e5),))  # steps of two delays of 20 ms
    assert server_of(distant, 2).latency_s == pytest.approx(0.02)
    paced = profile(4, update_s=0.1, pace=5.0)
    assert server_of(paced, 2).apply_s == pytest.approx(0.01)


def test_iterations_that_have_run_begin_in_step() -> None:
    """Equal workers wait for all pulls at once at first, later they keep the link busy."""
    facts = replace(profile(8), links=(Link("net", 0.3, 6e4),))
    always, later = predict(SSP(s=0), facts), predict(SSP(s=2), facts)
    first = predict(SSP(s=2), facts, iterations=12, skip=2)
    assert first.window == range(2, 12)
    assert later.iteration_s < first.iteration_s < always.iteration_s
    assert first.idle_s["net"] + first.busy_s["net"] == pytest.approx(first.iteration_s)
    assert len(first.trace.ends_s[0]) == 12
    runs = [
        run_served(server_of(facts, 1), compute, 2)
        for compute in (
            compute_seconds(facts, Ranks(jitter=0.01), 12, seed) for seed in range(REPLAYS)
        )
    ]
    ends = [np.array(run.ends_s).max(axis=0) for run in runs]
    mean_s = np.mean([(last[-1] - last[1]) / 10 for last in ends])
    assert first.iteration_s == pytest.approx(mean_s)
    assert predict(SSP(s=2), facts, iterations=12, skip=2, seed=1) != first
    # Whole clocks of two iterations count.
    twice = predict(SSP(s=2, accumulate=2), facts, iterations=13, skip=3)
    assert twice.window == range(4, 12)


def test_predict_is_ssps() -> None:
    facts = profile(4, update_s=0.01)
    prediction = predict(SSP(s=0), facts, servers=1)
    # The pull that began first ends first. From the push after it on, the link is busy.
    first = sum(0.95**n for n in range(4))
    expected = 0.6 + 0.01 + (first + 4) * 8000 / 1.5e5 + 2 * 0.001
    assert prediction.iteration_s == pytest.approx(expected)
    assert prediction.bound_s == pytest.approx(0.6)
    assert prediction.exposed_s == pytest.approx(prediction.iteration_s - 0.6)
    assert prediction.trace.iteration_s(10) == pytest.approx(prediction.iteration_s, rel=1e-6)
    stale = predict(SSP(s=4), facts, servers=4, ranks=Ranks(jitter=0.2))
    assert 0.6 <= stale.iteration_s < prediction.iteration_s
    bigger = predict(SSP(s=0, accumulate=4), facts)
    assert bigger.iteration_s < prediction.iteration_s
    with pytest.raises(ValueError, match="servers"):
        predict(SSP(), facts, servers=0)
    with pytest.raises(ValueError, match="votes"):
        predict(SSP(), facts, votes={"sync": 0.5})
    with pytest.raises(ValueError, match="no plan"):
        planned(SSP())


def test_pushes_and_pulls_have_rates_of_their_own() -> None:
    """Pushes at the workers' uplinks, pulls at the server's; then at what workers receive."""
    server = Server(10.0, 80.0, (20.0,) * 2, send_rate=40.0, receive_caps=(30.0,) * 2)
    assert steady_s(server, [1.0] * 2, 0) == pytest.approx(1.0 + 10 / 20 + 10 / 20)
    slow = Server(10.0, 80.0, (20.0,) * 2, send_rate=800.0, receive_caps=(5.0,) * 2)
    assert steady_s(slow, [1.0] * 2, 0) == pytest.approx(1.0 + 10 / 20 + 10 / 5)
