"""A profile on other clusters: the formulas of a ring, and what stays."""

import json
from dataclasses import replace

import pytest

from offbeat.core.profile.elsewhere import PAYLOAD, extrapolate
from offbeat.profile import Bucket, GradientNoise, Link, Profile

LINK = Link(
    "net",
    0.003,
    5e6,
    small=((1000, 0.004), (5000, 0.004)),
    halves={"all_gather": (0.002, 9e6)},
    cpu_s_per_message=1e-4,
    cpu_s_per_byte=1e-9,
    jitter=0.05,
    vote_s=0.002,
)
PROFILE = Profile(
    (Bucket("a", 0.01, 0.02, 10**6, {"net": 0.203}), Bucket("b", 0.01, 0.02, 10**6)),
    (LINK,),
    world_size=4,
    rank_scale=(1.0, 1.0, 1.0, 2.0),
    jitter=0.1,
    rank_jitter=(0.0, 0.0, 0.0, 0.4),
    noise=GradientNoise(1.0, 1.0, 8.0, 0.1),
)


def test_as_measured_nothing_changes():
    assert extrapolate(PROFILE) is PROFILE
    assert extrapolate(PROFILE, hosts=4) is PROFILE


def test_another_rate_is_what_a_ring_gets_of_it():
    link = extrapolate(PROFILE, rate_bps=80e6).links[0]
    assert link.bytes_per_s == pytest.approx(PAYLOAD * 10e6 * 4 / 6)
    assert (link.latency_s, link.jitter, link.cpu_s_per_byte) == (0.003, 0.05, 1e-9)
    faster = link.bytes_per_s / 5e6
    assert link.halves == {"all_gather": (0.002, pytest.approx(9e6 * faster))}
    assert link.small[0][1] == pytest.approx(0.0038 + 1000 / link.bytes_per_s)
    assert link.small[1][1] == pytest.approx(0.003 + 5000 / link.bytes_per_s)


def test_more_hosts_have_more_steps_and_nearly_the_same_bytes():
    there = extrapolate(PROFILE, hosts=8)
    link = there.links[0]
    more = (2 * 7 / 8) / (2 * 3 / 4)
    assert link.latency_s == pytest.approx(0.003 * 7 / 3)
    assert link.vote_s == pytest.approx(0.002 * 7 / 3)
    assert link.bytes_per_s == pytest.approx(5e6 / more)
    assert link.cpu_s_per_message == pytest.approx(1e-4 * 7 / 3)
    assert link.cpu_s_per_byte == pytest.approx(1e-9 * more)
    assert there.buckets[0].communication_s["net"] == pytest.approx(0.003 * 7 / 3 + 0.2 * more)
    assert there.rank_scale == PROFILE.rank_scale * 2
    assert there.rank_jitter == PROFILE.rank_jitter * 2
    assert extrapolate(PROFILE, hosts=2).rank_scale == (1.0, 1.0)
    assert there.noise == replace(PROFILE.noise, noise_sq=4.0)


def test_there_and_back_is_the_same():
    back = extrapolate(extrapolate(PROFILE, hosts=32), hosts=4).links[0]
    for name in ("latency_s", "bytes_per_s", "cpu_s_per_byte"):
        assert getattr(back, name) == pytest.approx(getattr(LINK, name))


def test_a_jitter_is_all_ranks():
    there = extrapolate(PROFILE, jitter=0.2)
    assert there.jitters == (0.2,) * 4
    assert replace(there, jitter=0.1, rank_jitter=PROFILE.rank_jitter) == PROFILE


def test_the_jitters_survive_a_file():
    plain = replace(PROFILE, links=(replace(LINK, halves={}),))
    assert Profile.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain
    assert PROFILE.jitters == (0.0, 0.0, 0.0, 0.4)
    assert replace(PROFILE, rank_jitter=()).jitters == (0.1,) * 4
    with pytest.raises(ValueError, match=r"rank_jitter \(1 entries\) must have one entry per rank"):
        replace(PROFILE, rank_jitter=(0.1,))
    with pytest.raises(ValueError, match=r"jitter of link 'net' \(-1\) must be a finite number"):
        replace(PROFILE, links=(replace(LINK, jitter=-1),))


@pytest.mark.parametrize("hosts", [1, 0])
def test_a_ring_has_two_ranks(hosts):
    with pytest.raises(ValueError, match=rf"hosts \({hosts}\) must be at least 2"):
        extrapolate(PROFILE, hosts=hosts)
    with pytest.raises(ValueError, match=r"world_size of the profile \(1\) must be at least 2"):
        extrapolate(replace(PROFILE, world_size=1, rank_scale=(), rank_jitter=()), hosts=4)
