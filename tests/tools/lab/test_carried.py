"""What all hosts carry at once: what is measured, what is refused; once with real namespaces."""

from dataclasses import replace

import pytest

from offbeat.lab import Cluster, HostOverride, Lab, LabError, Link, Pair
from offbeat.lab.probe_report import Throughput, needs_check, ring_ways

MBIT = 10**6


def carried(cluster: Cluster, share: float) -> Throughput:
    """As if this share of every rate had been measured."""
    ways = ring_ways(cluster)
    return Throughput(ways, [share * (way.way.rate_bps or 0) for way in ways])


def test_every_host_sends_to_the_next_one_as_fast_as_both_may():
    cluster = Cluster(
        hosts=3,
        links=(Link(rate="100mbit"), Link(name="far", rate="1gbit", latency="5ms"), Link(name="x")),
        overrides=(HostOverride(host=1, rates={"net": "40mbit"}),),
        pairs=(Pair(hosts=(2, 0), rates={"net": "7mbit"}),),
    )
    ways = ring_ways(cluster)
    assert [(way.link, *way.hosts, way.way.rate_bps) for way in ways] == [
        ("net", 0, 1, 40 * MBIT),
        ("net", 1, 2, 40 * MBIT),
        ("net", 2, 0, 7 * MBIT),
    ]
    assert ways[2].to_address == "10.77.0.1"
    assert ring_ways(Cluster.simple(1, "1gbit")) == []


def test_only_much_is_measured():
    assert not needs_check(ring_ways(Cluster.simple(4, "200mbit")))
    assert needs_check(ring_ways(Cluster.simple(5, "200mbit")))
    assert not needs_check(ring_ways(Cluster.simple(9, "unlimited")))


def test_less_than_nine_tenths_is_refused_with_rate_hosts_and_remedy():
    cluster = Cluster.simple(4, "10gbit")
    carried(cluster, 0.91).check()
    with pytest.raises(LabError, match=r"10gbit.*4 hosts.*20gbit.*4\.5gbit"):
        carried(cluster, 0.5).check()
    record = carried(Cluster.simple(4, "1gbit"), 0.95).record()
    assert {key: record[key] for key in ("link", "hosts", "asked", "measured")} == {
        "link": "net",
        "hosts": "all at once",
        "asked": "4gbit in all",
        "measured": "3.8gbit in all",
    }
    assert record["rate_bps"] == pytest.approx(0.95 * record["asked_rate_bps"])


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("namespaces")
def test_what_cannot_be_carried_is_refused_and_little_is_not_measured():
    with Lab(Cluster.simple(6, "32gbit")) as lab, pytest.raises(LabError, match="6 hosts"):
        lab.verify(limit_s=0.1)
    with Lab(Cluster.simple(3, "20mbit")) as lab:
        assert lab.verify() is None
        ways = ring_ways(lab.cluster)
        rates_bps = lab.process.request("flood", ways=ways, limit_s=0.3)
        # Never faster than the rate, apart from bursts, and all of them at once.
        assert all(1e6 < rate_bps < 1.25 * 20e6 for rate_bps in rates_bps)
        assert len(rates_bps) == 3
        assert replace(carried(lab.cluster, 1.0), rates_bps=rates_bps).share < 1.25
