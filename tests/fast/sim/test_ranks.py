"""How ranks differ: jitter, its seed, and what is refused."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from offbeat.plan import INSIDE
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, simulate
from offbeat.strategies import BSP, LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)),
    (Link("net", 0.5, 4.0),),
    world_size=4,
    update_s=0.5,
)
PLAN = LocalSGD(period=2).plan(PROFILE)


def test_jitter_has_mean_one_and_the_asked_deviation():
    noise = Ranks(jitter=0.3).noise(4000, replace(PROFILE, world_size=50), seed=1)
    assert noise is not None
    assert noise.min() > 0
    assert noise.mean() == pytest.approx(1.0, abs=0.005)
    assert noise.std() == pytest.approx(0.3, abs=0.005)
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.05


NODES = replace(PROFILE, world_size=3, topology=(2, 3, 1), inside=Link(INSIDE, 0.1, 12.0))


def test_ranks_of_a_node_wait_for_the_slowest_of_them():
    """Each replica takes the largest of as many factors as it has ranks."""
    alone = replace(PROFILE, world_size=9)  # the same draws, three for each replica
    single = Ranks(jitter=0.3).noise(5000, alone, seed=1)
    noise = Ranks(jitter=0.3).noise(5000, NODES, seed=1)
    assert single is not None
    assert noise is not None
    for replica, ranks in enumerate(NODES.topology):
        largest = single[:, 3 * replica : 3 * replica + ranks].max(axis=1)
        assert noise[:, replica] == pytest.approx(largest)
    expected = Ranks(jitter=0.3).expected_noise(NODES)
    assert noise.mean(axis=0) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.3, 1.0])
def test_expected_time_of_the_slowest_rank(jitter):
    """In closed form: 1 for one rank, and 2 F(s / sqrt 2) for two, as for the value of an option to
    exchange one asset for another (Margrabe 1978)."""
    spread = NormalDist().cdf(math.sqrt(math.log1p(jitter**2) / 2))
    two, three, one = Ranks(jitter=jitter).expected_noise(NODES)
    assert (one, two) == pytest.approx((1.0, 2 * spread))
    assert three == pytest.approx(1.0) if not jitter else three > two
    sharded = replace(NODES, topology=(2,) * 3, inside=None, sharded=True)
    for alike in (sharded, replace(NODES, pace=2.0)):  # an emulated host draws once for its ranks
        assert Ranks(jitter=jitter).expected_noise(alike) == pytest.approx([1.0] * 3)


def test_the_seed_decides():
    one, again, other = (
        simulate(PLAN, PROFILE, ranks=Ranks(jitter=0.1), seed=seed) for seed in (5, 5, 6)
    )
    assert one == again
    assert one.ends_s != other.ends_s


def test_equal_scales_are_one_row():
    alike = simulate(PLAN, PROFILE, ranks=Ranks(scale=(2.0,) * 4))
    uneven = simulate(PLAN, PROFILE, ranks=Ranks(scale=(2.0, 2.0, 2.0, 2.0 + 1e-15)))
    assert (len(alike.ends_s), len(uneven.ends_s)) == (1, 4)
    assert alike.notes["ranks"] == uneven.notes["ranks"] == 4
    for row in uneven.ends_s:
        assert row == pytest.approx(alike.ends_s[0])


def test_scale_replaces_the_profiles_but_spares_other_work():
    profile = Profile(
        PROFILE.buckets, PROFILE.links, 4, update_s=0.5, other_s=10.0, rank_scale=(1, 2, 3, 4)
    )
    message_s = 0.5 + 12 / 4
    assert predict(BSP(), profile).iteration_s == pytest.approx(10 + 4 * 5 + message_s)
    halved = Ranks(scale=(0.5, 0.5, 0.5, 0.25))
    assert predict(BSP(), profile, ranks=halved).iteration_s == pytest.approx(
        10 + 0.5 * 5 + message_s
    )


def test_predicted_time_of_nodes_contains_the_wait_for_the_slowest_rank():
    """Between averages a replica of two ranks takes 2 F(s / sqrt 2) times its compute."""
    pair = replace(NODES, world_size=1, topology=(2,), jitter=0.3)
    steady = predict(LocalSGD(period=100), replace(pair, jitter=0.0)).iteration_s
    found = predict(LocalSGD(period=100), pair).iteration_s
    more = 2 * NormalDist().cdf(math.sqrt(math.log1p(0.3**2) / 2)) - 1
    assert found - steady == pytest.approx(more * 5.0, rel=0.1)  # compute takes 5 s
