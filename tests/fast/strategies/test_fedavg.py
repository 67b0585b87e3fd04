"""FedAvg: who is drawn, how they are weighted, what it equals, what it refuses."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from offbeat.core.rules.select import draw_samples
from offbeat.core.strategy.parsing import strategy
from offbeat.core.verify.check import check
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import BSP, FedAvg, LocalSGD, create
from offbeat.testing.conformance import equals_equations, interpret_plan
from offbeat.testing.replicas import Task, momentum

PROFILE = Profile(
    tuple(Bucket(f"b{b}", 0.01, 0.02, 1000 * (b + 1)) for b in range(3)),
    (Link("net", 1e-3, 1e6),),
    world_size=4,
)
TASK = Task([3, 1, 4])


def weights(strategy, iterations=9):
    return np.array(interpret_plan(strategy.plan(PROFILE), TASK, 4, iterations, momentum))


def test_all_workers_after_every_step_are_bsp():
    assert abs(weights(FedAvg(local_steps=1)) - weights(BSP())).max() < 1e-12


def test_all_workers_alike_are_local_sgd():
    assert np.array_equal(weights(FedAvg(local_steps=3)), weights(LocalSGD(period=3)))


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg(fraction=0.5, local_steps=2),
        FedAvg(fraction=0.25, local_steps=1, seed=7),
        FedAvg(samples=(1, 2, 3, 4), local_steps=2, state="averaged"),
        FedAvg(fraction=0.75, samples=(10, 1, 1, 1), local_steps=3, state="reset"),
        FedAvg(local_steps=(1, 4, 2, 4)),
        FedAvg(fraction=0.5, samples=(1, 2, 3, 4), local_steps=(3, 1, 2, 3), state="averaged"),
        FedAvg(local_steps=(2, 1, 3, 3), state="reset"),
    ],
    ids=str,
)
def test_draws_and_weighs_as_its_equations_say(strategy):
    equals_equations(strategy, PROFILE, ranks=4)


def test_after_a_round_everyone_has_the_average_of_those_drawn():
    strategy = FedAvg(fraction=0.5, samples=(1, 2, 3, 4), local_steps=1, seed=1)
    found = weights(strategy, iterations=2)
    gradients = [TASK.gradient(r, 0, range(3), TASK.start) for r in range(4)]
    stepped = np.array([TASK.start - 0.1 * g for g in gradients])
    counts = draw_samples((1, 2, 3, 4), 0.5, 1, 0)
    assert sorted(map(bool, counts)) == [False, False, True, True]
    average = np.array(counts) @ stepped / sum(counts)
    np.testing.assert_allclose(found[1], np.tile(average, (4, 1)), rtol=0, atol=1e-12)


def test_who_has_done_its_steps_waits_for_the_end_of_the_round():
    """Two workers, one and three steps per round: neither weights nor momentum move meanwhile."""
    two = replace(PROFILE, world_size=2)
    plan = FedAvg(local_steps=(1, 3), samples=(1, 4)).plan(two)
    found = interpret_plan(plan, TASK, 2, 8, momentum)
    w, m = np.array([TASK.start] * 2), np.zeros((2, len(TASK.start)))
    for t in range(8):
        np.testing.assert_allclose(found[t], w, rtol=0, atol=1e-12)
        for rank, steps in enumerate((1, 3)):
            if t % 3 < steps:
                m[rank] = 0.9 * m[rank] + TASK.gradient(rank, t, range(3), w[rank])
                w[rank] = w[rank] - 0.1 * m[rank]
        if t % 3 == 2:
            w[:] = (w[0] + 4 * w[1]) / 5


def test_unequal_rounds_are_sound_and_take_as_long_as_the_longest():
    """The others compute as well; they only do not step."""
    uneven, even = FedAvg(local_steps=(1, 3, 2, 3)), FedAvg(local_steps=3)
    assert check(uneven.plan(PROFILE), PROFILE) == []
    assert uneven.plan(PROFILE).fact("local_steps") == [1, 3, 2, 3]
    assert uneven.bound_s(PROFILE) == even.bound_s(PROFILE)
    timed = replace(PROFILE, update_s=0.01)
    seconds = [predict(s, timed).iteration_s for s in (uneven, even)]
    assert seconds[0] == pytest.approx(seconds[1])
    assert FedAvg(local_steps=(3, 3, 3, 3)).plan(PROFILE) == even.plan(PROFILE)


def test_rounds_draw_so_many_workers_evenly_and_the_seed_repeats_them():
    rounds = [tuple(map(bool, draw_samples((1,) * 8, 0.25, 3, done))) for done in range(400)]
    assert {sum(chosen) for chosen in rounds} == {2}
    times = Counter(rank for chosen in rounds for rank, is_in in enumerate(chosen) if is_in)
    assert all(60 <= times[rank] <= 140 for rank in range(8))
    assert rounds == [
        tuple(map(bool, draw_samples((1,) * 8, 0.25, 3, done))) for done in range(400)
    ]
    assert rounds != [
        tuple(map(bool, draw_samples((1,) * 8, 0.25, 4, done))) for done in range(400)
    ]
    assert sum(map(bool, draw_samples((1,) * 8, 0.01, 0, 0))) == 1


def test_a_worker_that_is_not_drawn_cannot_spoil_the_average():
    """Whatever it has: 0 times infinity would not be 0."""
    strategy = FedAvg(fraction=0.5, local_steps=1, seed=1)
    away = draw_samples((1,) * 4, 0.5, 1, 0).index(0)

    class Broken(Task):
        def gradient(self, rank, iteration, buckets, weights):
            broken = rank == away and iteration == 0
            return super().gradient(rank, iteration, buckets, weights) * (np.inf if broken else 1)

    with np.errstate(invalid="ignore"):
        found = interpret_plan(strategy.plan(PROFILE), Broken([3, 1, 4]), 4, 2, momentum)
    assert np.isfinite(found[1]).all()


def test_drawn_workers_without_samples_count_equally():
    plan = FedAvg(local_steps=1, fraction=0.5, samples=(1, 2, 3, 4)).plan(PROFILE)
    applies = [
        replace(a, args={**dict(a.args), "samples": (0.0,) * 4}) if a.rule == "select" else a
        for a in plan.applies
    ]
    plan = replace(plan, applies=tuple(applies))
    weights = np.array(interpret_plan(plan, TASK, 4, 9, momentum))
    assert np.isfinite(weights).all()
    assert np.ptp(weights, axis=1).max() < 1e-12


def test_the_length_of_a_round():
    assert FedAvg().plan(PROFILE).period == 5
    assert FedAvg(local_steps=20).plan(PROFILE).period == 20
    assert FedAvg(local_steps=(25, 1, 10, 25)).plan(PROFILE).period == 25


def test_samples_may_come_from_json_and_are_one_per_worker():
    two = create("fedavg", {"samples": [100, 250]})
    assert two == FedAvg(samples=(100.0, 250.0))
    with pytest.raises(ValueError, match=r"samples \(2 numbers\) must have one number per worker"):
        two.plan(PROFILE)


def test_steps_may_come_from_json_or_the_command_line_and_are_one_per_worker():
    two = create("fedavg", {"local_steps": [1, 2]})
    assert two == FedAvg(local_steps=(1, 2)) == strategy("fedavg", ["local_steps=1/2"])
    assert strategy("fedavg", ["local_steps=2"]) == FedAvg(local_steps=2)
    with pytest.raises(ValueError, match=r"local_steps \(2 numbers\) must have one number per"):
        two.plan(PROFILE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0}, r"fraction \(0\) must lie above 0"),
        ({"fraction": 1.1}, r"fraction \(1.1\) must lie above 0 and be at most 1"),
        ({"fraction": float("nan")}, r"fraction \(nan\) must lie above 0"),
        ({"local_steps": 0}, r"local_steps \(0\) must be an integer of at least 1"),
        ({"local_steps": (2, 0)}, r"local_steps \(0\) must be an integer of at least 1"),
        ({"local_steps": ()}, r"local_steps \(\(\)\) must have one number per worker"),
        ({"samples": (1, 0)}, r"samples \(\(1, 0\)\) must be numbers above 0"),
        ({"samples": ()}, r"samples \(\(\)\) must be numbers above 0"),
        ({"seed": -1}, r"seed \(-1\) must be an integer of at least 0"),
    ],
)
def test_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        FedAvg(**settings)
