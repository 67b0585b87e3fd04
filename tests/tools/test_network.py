"""A given profile on the cluster of a run: computed quantities, refusals, records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cases.layered import layered_script

from offbeat.cli import entry as cli
from offbeat.core.measuring.processors import processors
from offbeat.core.profile.elsewhere import PAYLOAD, extrapolate
from offbeat.experiments import comparison
from offbeat.experiments.comparison import Setup
from offbeat.experiments.profile_for_network import compute_for, ranks_on, with_network
from offbeat.lab import Cluster, NoLab
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks

RATE = 200e6
# A ring of 4 sends every byte 1.5 times.
LINK = Link("net", 1e-3, PAYLOAD * RATE / 8 / 1.5)
ESTIMATED = Profile(
    tuple(Bucket(f"h.{i}", 0.001, 0.002, 10**5) for i in range(4)), (LINK,), world_size=4
)
KNOWN = with_network(ESTIMATED, Cluster.simple(4, RATE), 4)


def computed(profile: Profile, cluster: Cluster, pace=None, *, shaped: bool = True, ranks: int = 0):
    return compute_for(
        profile, cluster, ranks or cluster.world_size, shaped=shaped, pace=pace, file="p.json"
    )


def test_a_profile_of_such_a_cluster_stays_as_measured():
    assert computed(KNOWN, Cluster.simple(4, "200mbit")).quantities == ()
    assert computed(KNOWN, Cluster.simple(4, "200mbit")).profile == KNOWN
    # An estimated rate is not exact enough to contradict a close one.
    there = computed(ESTIMATED, Cluster.simple(4, "250mbit"))
    assert there.quantities == ()
    assert there.profile.links[0].bytes_per_s == LINK.bytes_per_s


@pytest.mark.parametrize("profile", [KNOWN, ESTIMATED], ids=["recorded", "estimated"])
def test_another_rate_is_computed_and_stated(profile):
    there = computed(profile, Cluster.simple(4, "10mbit"))
    assert (
        there.profile.links[0].bytes_per_s
        == extrapolate(profile, rate_bps=1e7).links[0].bytes_per_s
    )
    assert there.profile.links[0].asked_rate_bps == 1e7
    ((what, was, here),) = there.quantities
    assert (what, was.removeprefix("about "), here) == ("rate of net", "200mbit", "10mbit")
    # A recorded rate contradicts a close one.
    assert bool(computed(profile, Cluster.simple(4, "250mbit")).quantities) == (profile is KNOWN)


def test_the_slowest_uplink_bounds_a_ring_and_not_the_others():
    cluster = Cluster.from_toml(
        'hosts = 4\nrate = "200mbit"\nuplink = "40mbit"\n[[overrides]]\nhost = 2\n'
        'uplinks = { net = "10mbit" }'
    )
    assert computed(KNOWN, cluster).profile.links[0].asked_rate_bps == 1e7
    ranks = ranks_on(cluster, 4)
    assert ranks.link_rates == {"net": (4.0, 4.0, 1.0, 4.0)}
    assert ranks.receive_rates == {"net": (20.0,) * 4}
    assert ranks.server_rates == {"net": (4.0, 20.0)}  # of the best host
    served = ranks_on(cluster, 2, served=[2])
    assert served.link_rates == {"net": (1.0, 1.0)}
    assert served.server_rates == {"net": (0.25, 5.0)}
    paired = Cluster.from_toml(
        cluster.to_toml() + '[[pairs]]\nhosts = [0, 1]\nrates = { net = "5mbit" }'
    )
    assert ranks_on(paired, 4) == ranks_on(Cluster.simple(4, "1mbit"), 4) == Ranks()
    assert ranks_on(Cluster.simple(4), 4) == Ranks()
    assert Setup(("-m", "this"), cluster).ranks == ranks
    assert Setup(("-m", "this"), cluster, shaped=False).ranks is None


def test_the_slowest_way_between_ranks_counts():
    slow = Cluster.from_toml(
        'hosts = 4\nrate = "200mbit"\n[[pairs]]\nhosts = [1, 2]\nrates = { net = "10mbit" }'
    )
    assert computed(KNOWN, slow).profile.links[0].asked_rate_bps == 1e7
    server = Cluster.from_toml(
        'hosts = 5\nrate = "200mbit"\n[[overrides]]\nhost = 4\nrates = { net = "10mbit" }'
    )
    assert computed(KNOWN, server, ranks=4).quantities == ()  # host 4 only serves


def test_more_ranks_are_computed_at_a_pace_for_all_of_them():
    there = computed(KNOWN.with_pace(2.0), Cluster.simple(8, "200mbit"))
    assert there.profile.world_size == 8
    assert there.profile.pace == 4.0
    assert [what for what, *_ in there.quantities] == ["ranks", "pace"]
    fewer = computed(KNOWN.with_pace(2.0), Cluster.simple(2, "200mbit"))
    assert (fewer.profile.world_size, fewer.profile.pace) == (2, 2.0)
    many = 4 * processors() + 4
    assert computed(KNOWN, Cluster.simple(many, "200mbit")).record()["crowded"] == many
    assert not computed(KNOWN.with_pace(2.0), Cluster.simple(many, "200mbit")).record()["crowded"]
    assert computed(KNOWN, Cluster.simple(8, "200mbit"), 3.0).profile.pace == 3.0


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('hosts = 4\nrate = "200mbit"\nlatency = "20ms"', r"latency of link 'net' \(0.02\)"),
        ('hosts = 4\nrate = "200mbit"\nloss = "1%"', r"loss of link 'net' \(0.01\)"),
        ("hosts = 4", r"rate of link 'net' \(unlimited\) must be a number"),
        ('hosts = 1\nrate = "200mbit"', r"world_size \(4\) of p.json"),
        (
            'hosts = 4\n[[links]]\nname = "lan"\nrate = "200mbit"',
            r"links \(lan\) .* \(net\)",
        ),
    ],
)
def test_what_no_formula_computes_is_refused(toml, words):
    with pytest.raises(ValueError, match=words):
        computed(KNOWN, Cluster.from_toml(toml))


def test_a_delay_that_the_messages_cannot_have_had_is_refused():
    far = Cluster.simple(4, "200mbit", latency="20ms")
    with pytest.raises(ValueError, match=r"latency_s \(0.001\) .* at least 0.06 s"):
        computed(ESTIMATED, far)
    measured = replace(ESTIMATED, links=(replace(LINK, latency_s=0.13),))
    assert computed(measured, far).quantities == ()


def test_paced_hosts_of_other_speeds_are_refused():
    uneven = Cluster.from_toml('hosts = 4\nrate = "200mbit"\n[[overrides]]\nhost = 0\nspeed = 0.5')
    with pytest.raises(ValueError, match=r"speed of the hosts \(1.6, 0.8, 0.8, 0.8\)"):
        computed(KNOWN.with_pace(2.0), uneven)
    made = computed(KNOWN, uneven, 2.0).profile
    assert made == KNOWN.with_pace(2.0, [0.5, 1, 1, 1], [0.0] * 4)
    assert computed(made, uneven).quantities == ()


@pytest.mark.parametrize("setting", ["speed = 0.5", "jitter = 0.1"])
def test_hosts_that_differ_need_a_pace(setting):
    toml = 'hosts = 4\nrate = "200mbit"\n[[overrides]]\nhost = 0\n'
    cluster = Cluster.from_toml(f"{toml}{setting}\n")
    with pytest.raises(ValueError, match=r"need a pace, and p.json has none"):
        computed(KNOWN, cluster)
    assert computed(KNOWN, cluster, 2.0).profile.pace == 2.0


def test_without_a_lab_nothing_is_compared():
    there = computed(KNOWN, Cluster.simple(4), shaped=False)
    assert (there.profile, there.quantities, there.compared) == (KNOWN, (), False)


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_predicts_for_its_own_network_and_records_it(tmp_path, monkeypatch, capsys):
    """Measured at 200 Mbit/s on 4 hosts, run at 10 Mbit/s on 2; the lab is a stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "Lab", lambda cluster, _: NoLab(cluster))
    (tmp_path / "train.py").write_text(layered_script(4, 10**5))
    KNOWN.save("p.json")
    argv = ["run", "--profile", "p.json", "--hosts", "2", "--rate", "10mbit", "--out", "r"]
    assert cli.main([*argv, "train.py"]) == 0
    said = capsys.readouterr().out
    assert said.count("200mbit -> 10mbit") == 2  # before and after the run
    given = json.loads((tmp_path / "r/summary.json").read_text())["profile"]
    assert given["computed"] == [
        {"quantity": "rate of net", "measured": "200mbit", "here": "10mbit"},
        {"quantity": "ranks", "measured": "4", "here": "2"},
    ]
    there = Profile.load(tmp_path / "r/profile.json")
    assert there == extrapolate(KNOWN, hosts=2, rate_bps=1e7)
