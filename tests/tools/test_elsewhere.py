"""A profile on other clusters: the formulas of a ring, and what stays."""

import json
import random
from dataclasses import replace

import pytest

from offbeat.cli import main
from offbeat.core.profile.elsewhere import PAYLOAD, extrapolate
from offbeat.elastic.profile import for_members, with_slower_replicas
from offbeat.experiments.elsewhere import with_nodes, with_slower_links
from offbeat.plan import Payload
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


def test_another_rate_keeps_steps_of_halves_between_two_ranks():
    distant = replace(LINK, latency_s=0.24, halves={}, pair_bytes_per_s=9e6)
    profile = replace(PROFILE, links=(distant,))
    link = extrapolate(profile, rate_bps=80e6).links[0]
    assert link.pair_bytes_per_s == link.send_bytes_per_s(4) == pytest.approx(PAYLOAD * 10e6)
    assert link.half("all_gather", 4)[0] == distant.half("all_gather", 4)[0] == 0.16
    assert link.half("all_gather", 4)[1] == pytest.approx(PAYLOAD * 10e6 * 4 / 3)
    assert extrapolate(profile, hosts=8).links[0].pair_bytes_per_s == 9e6


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


def test_members_keep_their_compute_times_by_name():
    """Members leave and join in random order; a new one computes as long as the mean before."""
    draw = random.Random(0)
    for _ in range(50):
        count, profile = draw.randrange(2, 6), PROFILE
        scale = [draw.choice((0.5, 1.0, 2.0)) for _ in range(count)]
        jitters = [draw.choice((0.0, 0.1)) for _ in range(count)]
        profile = replace(extrapolate(PROFILE, hosts=count), rank_scale=(), rank_jitter=())
        profile = with_slower_replicas(profile, scale)
        profile = replace(profile, jitter=sum(jitters) / count, rank_jitter=tuple(jitters))
        names = [*range(count)]
        right = {name: (scale[name], jitters[name]) for name in names}
        for name in range(count, count + 6):
            stay = draw.sample(names, draw.randrange(1, len(names) + 1))
            now = [*stay, name] if draw.random() < 0.7 else stay
            before, names = names, now
            known = [right[one] for one in before]
            means = tuple(sum(column) / len(before) for column in zip(*known, strict=True))
            right = {one: right.get(one, means) for one in names}
            earlier = [before.index(one) if one in before else None for one in names]
            profile = for_members(profile, len(names), earlier)
            assert profile.world_size == len(names)
            own_s = PROFILE.forward_s + PROFILE.backward_s + PROFILE.update_s
            times = [
                one * (profile.forward_s + profile.backward_s + profile.update_s) / own_s
                for one in profile.scale_of_ranks
            ]
            assert times == pytest.approx([right[one][0] for one in names])
            assert profile.jitters == pytest.approx([right[one][1] for one in names])
            assert sum(profile.scale_of_ranks) / len(names) == pytest.approx(1)


def test_the_slow_member_stays_slow_when_another_one_leaves():
    profile = for_members(PROFILE, 3, [0, 2, 3])
    assert profile.rank_scale == pytest.approx((0.75, 0.75, 1.5))
    assert profile.forward_s == pytest.approx(PROFILE.forward_s * 4 / 3)
    assert profile.rank_jitter == (0.0, 0.0, 0.4)
    alike = for_members(profile, 2, [0, 1])
    assert (alike.rank_scale, alike.rank_jitter, alike.jitter) == ((), (), 0.0)
    assert alike.backward_s == pytest.approx(PROFILE.backward_s)
    link = extrapolate(PROFILE, hosts=2).links[0]
    assert alike.links[0].latency_s == pytest.approx(link.latency_s)


def test_equal_members_change_no_time():
    equal = replace(PROFILE, rank_scale=(), rank_jitter=())
    assert for_members(equal, 3, [0, 2, None]) == extrapolate(equal, hosts=3)
    assert for_members(PROFILE, 4, [0, 1, 2, 3]) is PROFILE


def test_slower_links_have_slower_votes():
    unknown = replace(PROFILE, links=(replace(LINK, vote_s=None),))
    assert with_slower_links(PROFILE, 3.0).links[0].vote_s == pytest.approx(0.006)
    assert with_slower_links(unknown, 3.0).links[0].vote_s is None


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


# ---- nodes of several ranks -----------------------------------------------------------------

INSIDE = Link("inside", 0.001, 1e8)
NODES = replace(
    PROFILE,
    buckets=(Bucket("a", 0.01, 0.02, 10**6), Bucket("b", 0.01, 0.02, 10**6)),
    topology=(2, 2, 2, 2),
    inside=INSIDE,
)


def test_more_ranks_inside_send_no_more_between_nodes():
    there = with_nodes(NODES, 4)
    assert (there.topology, there.ranks, there.world_size) == ((4,) * 4, 16, 4)
    inside, link = there.inside, there.links[0]
    assert inside.bytes_per_s == pytest.approx(1e8 * (2 * 1 / 2) / (2 * 3 / 4))
    assert inside.latency_s == pytest.approx(0.003)
    # A message takes as long as before and what an all-reduce inside takes longer.
    longer_s = inside.latency_s - 0.001 + 1e6 * (1 / inside.bytes_per_s - 1e-8)
    before_s = LINK.latency_s + 1e6 / LINK.bytes_per_s
    assert link.latency_s + 1e6 / link.bytes_per_s == pytest.approx(before_s + longer_s)
    assert link.small[0][1] == pytest.approx(0.004 + 0.002 + 1000 * (1 / inside.bytes_per_s - 1e-8))
    assert there.noise.noise_sq == pytest.approx(4.0)


def test_nodes_that_remain_keep_their_numbers_of_ranks():
    uneven = replace(NODES, world_size=3, topology=(2, 2, 4), rank_scale=(), rank_jitter=())
    there = for_members(uneven, 2, [0, 2])
    assert (there.topology, there.ranks, there.world_size) == ((2, 4), 6, 2)


def test_single_ranks_become_nodes_and_nodes_single_ranks_again():
    there = with_nodes(PROFILE, 8, 1e9)
    assert there.topology == (8,) * 4
    assert there.inside.bytes_per_s == pytest.approx(PAYLOAD * 1e9 / 8 / (2 * 7 / 8))
    assert there.links[0].bytes_per_s < LINK.bytes_per_s
    again = with_nodes(there, 1)
    assert (again.topology, again.inside) == ((), None)
    assert again.links[0].bytes_per_s == pytest.approx(LINK.bytes_per_s)
    assert again.links[0].latency_s == pytest.approx(LINK.latency_s)
    assert again.buckets[0].communication_s["net"] == pytest.approx(0.203)
    assert with_nodes(PROFILE, 1) is PROFILE


def test_more_shards_are_smaller_and_share_the_link():
    sharded = replace(NODES, inside=None, sharded=True)
    there = with_nodes(sharded, 4)
    assert (there.topology, there.sharded) == ((4,) * 4, True)
    assert there.buckets[0].size_bytes == 500_000
    for verb in ("all_reduce", "all_gather"):
        payload = Payload("param", range(1))
        times = [p.message_s(payload, "net", verb) for p in (sharded, there)]
        assert times[0] == pytest.approx(times[1])


@pytest.mark.parametrize(
    ("profile", "per_node", "words"),
    [
        (PROFILE, 2, "--inside 10gbit"),
        (replace(NODES, topology=(2, 2, 2, 3)), 4, "must be equal"),
        (replace(NODES, inside=None, sharded=True), 1, "must be at least 2"),
    ],
)
def test_what_cannot_be_computed_of_nodes(profile, per_node, words):
    with pytest.raises(ValueError, match=words):
        with_nodes(profile, per_node)


def test_the_rate_inside_sharded_replicas_cannot_be_changed():
    sharded = replace(NODES, inside=None, sharded=True)
    for per_node in (NODES.topology[0], 4):
        with pytest.raises(ValueError, match=r"inside \(1000 Mbit/s\) must be left out"):
            with_nodes(sharded, per_node, 1e9)


def test_a_sweep_over_ranks_per_node(tmp_path, capsys):
    PROFILE.save(tmp_path / "profile.json")
    argv = ["simulate", "--profile", str(tmp_path / "profile.json"), "--strategy", "dreamddp"]
    nodes = ["--per-node", "1,2,4", "--inside", "1gbit", "--csv"]
    assert main([*argv, *nodes]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("strategy,period,hosts,per_node,rate")
    assert [row.split(",")[-6] for row in rows] == ["1", "2", "4"]
    assert main([*argv, "--inside", "1gbit"]) == 2
    assert "needs --per-node" in " ".join(capsys.readouterr().err.split())
