"""Parameter servers in a rehearsal equal their equations, on the simulator's timeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import rehearsed
from cases.rehearsed import SIZES, K, T, quadratic_profile, rehearse_quadratic
from oracle.quadratic import MOMENTUM, RATE, Quadratic

from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim import Ranks
from offbeat.core.sim.separate_workers import server_of
from offbeat.core.strategy.parsing import parse
from offbeat.server.simulation import simulate_served


def equations(strategy, profile):
    """Weights that each forward has seen, by worker: one server, event by event."""
    task = Quadratic(SIZES, K, T)
    start, a, c = task.numbers
    timeline, _ = simulate_served(strategy, profile, Ranks(), server_of(profile, 1), 40, 0)
    w, velocity = start.copy(), np.zeros_like(start)
    copies = np.repeat(start[None], K, axis=0)  # of the workers
    sent: list[list] = [[] for _ in range(K)]  # answers on their way
    arrived: list = [None] * K
    open_clocks: dict[int, list] = {}
    clock, taken, seen = [0] * K, [0] * K, [[] for _ in range(K)]
    gradient, pushed, gone = [None] * K, [None] * K, set()

    def step(g, rate):
        nonlocal w, velocity
        velocity = MOMENTUM * velocity + g + task.decay * w
        w = w - rate * velocity

    def refresh(worker):
        if arrived[worker] is not None:
            copies[worker], arrived[worker] = arrived[worker], None

    for _, kind, n in timeline.events:
        if n in gone:
            continue
        if kind in ("begin", "push") and clock[n] * strategy.accumulate == T:
            continue
        if kind == "begin":
            refresh(n)
            gradient[n] = np.zeros_like(start)
            for i in range(clock[n] * strategy.accumulate, (clock[n] + 1) * strategy.accumulate):
                seen[n].append(copies[n].copy())
                gradient[n] += a[n] * (copies[n] - c[n, i]) / strategy.accumulate
        elif kind == "push":
            pushed[n] = clock[n], gradient[n]
            clock[n] += 1
            refresh(n)
        elif kind == "pushed":
            at, g = pushed[n]
            taken[n] += 1
            if strategy.apply == "push":
                step(g, RATE / K)
            else:
                open_clocks.setdefault(at, []).append(g)
                if len(open_clocks[at]) == K:
                    step(np.mean(open_clocks.pop(at), axis=0), RATE)
            if clock[n] * strategy.accumulate == T:
                gone.add(n)
        elif kind == "answer":
            sent[n].append(w.copy())
        elif kind == "arrive":
            arrived[n] = sent[n].pop(0)
        if len(gone) == K:
            return seen
    raise AssertionError("the timeline is too short")


@pytest.mark.parametrize("name", ["ps-bsp", "ssp", "ssp:apply=push", "ssp:s=1:accumulate=3"])
def test_equals_its_equations(name):
    profile = extrapolate(quadratic_profile(K), jitter=0.3)
    curve, seen = rehearse_quadratic(name, jitter=0.3)
    expected = equations(parse(name), profile)
    np.testing.assert_allclose(np.array(seen), np.array(expected), rtol=0, atol=1e-12)
    assert len(curve.ends_s) == T


def rounds(strategy, profile):
    """Weights that each forward has seen, by worker: local steps, and steps with a quorum."""
    task = Quadratic(SIZES, K, T)
    start, a, c = task.numbers
    timeline, _ = simulate_served(strategy, profile, Ranks(), server_of(profile, 1), 40, 0)
    w, v = start.copy(), np.zeros_like(start)
    anchors, own = (np.repeat(start[None], K, axis=0) for _ in range(2))
    momenta, clock, seen = np.zeros_like(own), [0] * K, [[] for _ in range(K)]
    on_the_way, answers, open_round, since = [None] * K, [[] for _ in range(K)], [], None
    outer, most = strategy.outer, T // strategy.period

    def step():
        nonlocal w, v, since
        d = np.mean([change for _, change in open_round], axis=0)
        v = outer.momentum * v + d
        w = w - outer.lr * (d + outer.momentum * v)
        open_round.clear()
        since = None

    for at_s, kind, n in timeline.events:
        if since is not None and at_s >= since + strategy.grace_s:
            step()
        if clock[n] == most and kind in ("begin", "push"):
            return seen
        if kind == "begin":
            for i in range(clock[n] * strategy.period, (clock[n] + 1) * strategy.period):
                seen[n].append(own[n].copy())
                gradient = a[n] * (own[n] - c[n, i]) + task.decay * own[n]
                momenta[n] = MOMENTUM * momenta[n] + gradient
                own[n] = own[n] - RATE * momenta[n]
        elif kind == "push":
            on_the_way[n] = anchors[n] - own[n]
            clock[n] += 1
        elif kind == "pushed":
            open_round.append((n, on_the_way[n]))
            members = len({worker for worker, _ in open_round})
            enough = members >= (strategy.quorum or K)
            if members == K or (enough and not strategy.grace_s):
                step()
            elif enough and since is None:
                since = at_s
        elif kind == "answer":
            answers[n].append(w.copy())
        elif kind == "arrive":
            anchors[n] = own[n] = answers[n].pop(0)
    raise AssertionError("the timeline is too short")


@pytest.mark.parametrize("settings", ["quorum=2", "quorum=1:grace_s=0.02", "outer=0.7/0.5"])
def test_steps_with_a_quorum_equal_their_equations(settings):
    """Until the first worker has pushed all its changes: then fewer are present."""
    name = f"ps-diloco:period=2:{settings}"
    profile = extrapolate(quadratic_profile(K), jitter=0.3)
    curve, seen = rehearse_quadratic(name, jitter=0.3)
    expected = rounds(parse(name), profile)
    assert sum(map(len, expected)) > K * T / 2
    for mine, theirs in zip(seen, expected, strict=True):
        np.testing.assert_allclose(mine[: len(theirs)], theirs, rtol=0, atol=1e-12)
    assert len(curve.ends_s) == T // 2 * 2  # of complete clocks


def test_heloco_is_rehearsed():
    _, seen = rehearse_quadratic("ps-diloco:period=2:rule=heloco", jitter=0.3)
    assert [len(rows) for rows in seen] == [T] * K


def test_one_clock_for_all_is_synchronous():
    _, served = rehearse_quadratic("ps-bsp", jitter=0.3)
    _, expected = rehearse_quadratic("bsp")
    np.testing.assert_allclose(np.array(served), np.array(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ps-bsp", "ssp:s=1"])
def test_clock_is_the_simulators(name):
    profile, strategy = quadratic_profile(K), parse(name)
    curve, _ = rehearse_quadratic(name)
    timeline, _ = simulate_served(strategy, profile, Ranks(), server_of(profile, 1), 64, 0)
    expected = [max(ends) for ends in zip(*timeline.ends_s, strict=True)][:T]
    np.testing.assert_allclose(curve.ends_s, expected, rtol=1e-12)


def test_pushes_take_uplinks_and_pulls_take_downlinks():
    """A clock of PS-BSP is compute, a push over an uplink, a step, and a pull over a downlink, if
    the server has room for all workers."""
    profile, up, down = quadratic_profile(K), 0.25, 2.0
    ranks = Ranks(
        link_rates={"net": (up,) * K},
        receive_rates={"net": (down,) * K},
        server_rates={"net": (100.0, 100.0)},
    )
    curve, _ = rehearse_quadratic("ps-bsp", differences=ranks)
    even = server_of(profile, 1)
    size_bytes, rate = even.size_bytes, even.caps[0]
    compute_s = profile.other_s + profile.forward_s + profile.backward_s
    wait_s = size_bytes / (up * rate) + size_bytes / (down * rate) + 2 * even.latency_s
    clock_s = compute_s + wait_s + even.apply_s
    expected = [compute_s + clock * clock_s for clock in range(T)]
    np.testing.assert_allclose(curve.ends_s, expected, rtol=1e-9)


def test_reads_and_consolidate_see_the_server():
    """All workers have the same parameters after `consolidate`, and training goes on."""
    found = []

    def before(model, _rank, iteration):
        if iteration == 2:
            model.state_dict()  # reads the newest parameters, without other workers
        if iteration == 4:
            model.consolidate()
            found.append(rehearsed.flat(model.module))

    _, seen = rehearse_quadratic("ssp", jitter=0.3, before=before)
    assert len(found) == K
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=0)
    assert [len(rows) for rows in seen] == [T] * K
