"""What becomes different while ranks run: plans, when it is due, what is asked and measured."""

import pytest

from offbeat.lab import Change, Cluster, HostOverride, Lab, Link, NoLab, Pair
from offbeat.lab.description import Way
from offbeat.lab.probe import settled_rate_bps
from offbeat.lab.probe_report import MOST_WAYS, ProbeResult, ProbeTarget, probe_targets
from offbeat.lab.switch.link_state import LinkPlan, PairPlan
from offbeat.lab.templates import change_plans, link_plan

pytestmark = pytest.mark.timeout(30)

MBIT = 1_000_000


def plan_of(**settings) -> LinkPlan:
    return link_plan(Cluster(hosts=3, **settings), "net")


def test_the_plan_of_a_link_has_what_hosts_and_pairs_say():
    plan = plan_of(
        links=(Link(rate="10mbit", latency="5ms"),),
        overrides=(HostOverride(host=1, rates={"net": "4mbit"}, latencies={"net": "9ms"}),),
        pairs=(Pair(hosts=(0, 2), losses={"net": "1%"}),),
    )
    assert plan.rates_bps == (10 * MBIT, 4 * MBIT, 10 * MBIT)
    assert plan.latencies_s == pytest.approx((0.005, 0.009, 0.005))
    assert plan.pairs == (PairPlan((0, 2), loss=0.01),)
    assert (plan.latency_s(1, 2), plan.latency_s(0, 2)) == plan.latencies_s[1::-1]
    assert (plan.loss(2, 0), plan.loss(1, 0)) == (0.01, 0.0)


def test_uplinks_stay_when_rates_change():
    plan = plan_of(
        links=(Link(rate="10mbit", uplink="2mbit"),),
        overrides=(HostOverride(host=1, rates={"net": "4mbit"}),),
    )
    assert plan.rates_bps == (10 * MBIT, 4 * MBIT, 10 * MBIT)
    assert [plan.uplink_bps(host) for host in range(3)] == [2 * MBIT, 4 * MBIT, 2 * MBIT]
    assert plan_of(links=(Link(rate="10mbit"),)).uplinks_bps == ()


def test_hosts_without_an_uplink_change_in_both_directions():
    """An unlimited uplink is unshaped."""
    plan = plan_of(
        links=(Link(rate="10mbit"),),
        overrides=(HostOverride(host=1, uplinks={"net": "2mbit"}),),
    )
    changes = (Change(at=1, rate="5mbit", hosts=(0, 1)),)
    (change,) = change_plans(Cluster(hosts=3, changes=changes))
    plan = change.apply_to(plan)
    assert plan.rates_bps == (5 * MBIT, 5 * MBIT, 10 * MBIT)
    assert [plan.uplink_bps(host) for host in range(3)] == [5 * MBIT, 2 * MBIT, 10 * MBIT]
    plan = plan_of(links=(Link(rate="10mbit", uplink="unlimited"),))
    assert plan.rates_bps == (10 * MBIT,) * 3
    assert [plan.uplink_bps(host) for host in range(3)] == [None] * 3


SWITCHED = [
    ({}, False),
    ({"links": (Link(latency="5ms", loss=0.1),)}, False),  # netem does that, where there is one
    ({"overrides": (HostOverride(host=1, rates={"net": "4mbit"}),)}, False),
    ({"overrides": (HostOverride(host=1, latencies={"net": "4ms"}),)}, True),
    ({"overrides": (HostOverride(host=1, losses={"net": 0.1}),)}, True),
    ({"pairs": (Pair(hosts=(0, 1), rates={"net": "4mbit"}),)}, True),
    ({"pairs": (Pair(hosts=(0, 1)),)}, False),
    ({"changes": (Change(at=1, rate="1mbit"),)}, False),
    ({"changes": (Change(at=1, latency="1ms"),)}, True),
    ({"changes": (Change(at=1, rate="1mbit", pair=(0, 1)),)}, True),
]


def test_only_what_the_kernel_cannot_do_needs_a_switch() -> None:
    for settings, switched in SWITCHED:
        assert plan_of(**settings).switched is switched


def test_changes_of_all_hosts_of_some_and_of_a_pair():
    plan = plan_of(links=(Link(rate="10mbit"),))
    changes = (
        Change(at="1s", rate="5mbit"),
        Change(at="2s", rate="unlimited", latency="3ms", hosts=(0, 2)),
        Change(at="3s", loss=0.5, pair=(2, 1)),
        Change(at="4s", latency="1ms", pair=(1, 2)),
    )
    steps = []
    for change in change_plans(Cluster(hosts=3, changes=changes)):
        plan = change.apply_to(plan)
        steps.append(plan)
    assert steps[0].rates_bps == (5 * MBIT,) * 3
    assert steps[1].rates_bps == (None, 5 * MBIT, None)
    assert steps[1].latencies_s == (0.003, 0.0, 0.003)
    assert (steps[2].loss(1, 2), steps[2].loss(0, 2), steps[2].latency_s(1, 2)) == (0.5, 0.0, 0.003)
    assert (steps[3].loss(1, 2), steps[3].latency_s(1, 2)) == (0.5, 0.001)


def test_a_change_is_of_every_link_unless_it_names_one():
    links = (Link(name="a"), Link(name="b"))
    changes = (Change(at=1, rate="1mbit"), Change(at=2, rate="2mbit", link="b"))
    plans = change_plans(Cluster(hosts=2, links=links, changes=changes))
    assert [(one.number, one.link, one.at_s) for one in plans] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 1, 2),
    ]


def test_changes_of_a_launch_are_in_order_of_time():
    """Equal times keep their order."""
    changes = tuple(Change(at=at, rate="1mbit") for at in ("5s", "1s", "5s"))
    cluster = Cluster(hosts=2, changes=changes)
    assert [(one.at_s, one.number) for one in Lab(cluster).changes()] == [(1, 1), (5, 0), (5, 2)]
    assert NoLab(cluster).changes() == []


def test_everything_that_is_asked_is_probed_and_every_host():
    cluster = Cluster(
        hosts=6,
        links=(Link(rate="10mbit"),),
        overrides=(HostOverride(host=2, rates={"net": "4mbit"}),),
        pairs=(Pair(hosts=(3, 5), latencies={"net": "9ms"}),),
    )
    asked = probe_targets(cluster)
    assert [a.hosts for a in asked] == [(0, 1), (0, 2), (3, 5)]
    assert [a.way.rate_bps for a in asked] == [10 * MBIT, 4 * MBIT, 10 * MBIT]
    assert [a.to_address for a in asked] == ["10.77.0.2", "10.77.0.3", "10.77.0.6"]
    assert {h for a in probe_targets(Cluster.simple(8)) for h in a.hosts} == set(range(8))
    assert len(probe_targets(Cluster.simple(250))) == MOST_WAYS
    assert probe_targets(Cluster.simple(1)) == []


def test_every_link_and_every_different_way_is_probed():
    links = tuple(Link(name=f"l{i}", rate="10mbit") for i in range(12))
    asked = probe_targets(Cluster(hosts=2, links=links))
    assert [a.link for a in asked] == [link.name for link in links]
    rates = [{"net": f"{i + 1}mbit"} for i in range(10)]
    pairs = tuple(Pair(hosts=(0, i + 1), rates=rate) for i, rate in enumerate(rates))
    asked = probe_targets(Cluster(hosts=11, links=(Link(rate="50mbit"),), pairs=pairs))
    assert {a.way.rate_bps for a in asked} == {MBIT * rate for rate in (*range(1, 11), 50)}


def test_more_than_ten_percent_off_is_a_warning():
    asked = ProbeTarget("net", (0, 1), "10.77.0.2", Way(10 * MBIT, 0.02, 0.0))
    fine, slow, late = (
        ProbeResult(asked, rate, latency)
        for rate, latency in ((9.5e6, 0.0209), (8.9e6, 0.02), (None, 0.025))
    )
    assert fine.deviations() == []
    assert [len(one.deviations()) for one in (slow, late)] == [1, 1]
    nothing = ProbeResult(ProbeTarget("net", (0, 1), "", Way(None, 0.0, 0.0)), None, 0.0001)
    assert nothing.deviations() == []
    assert fine.record()["asked"] == "10mbit, 20ms"


def test_the_rate_is_that_of_the_second_half():
    points = [
        (0.0, 0),
        (0.1, 1_000_000),
        *((0.5 + i / 10, 2_000_000 + i * 125_000) for i in range(6)),
    ]
    assert settled_rate_bps(points, 1 / 2) == pytest.approx(10e6 * 1514 / 1448)
    assert settled_rate_bps(points[:1], 1 / 2) is None
    assert settled_rate_bps([(0.0, 0), (0.5, 1000), (1.0, 2000)], 1 / 2) is None
