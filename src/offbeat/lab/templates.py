"""Conversion of a cluster's description to plans of its network."""

from collections.abc import Iterator
from typing import Any

from offbeat.core.units import parse_loss, parse_rate_bps, parse_time_s
from offbeat.lab.description import Cluster
from offbeat.lab.parts import Change, Pair
from offbeat.lab.switch.link_state import UNSHAPED, ChangePlan, LinkPlan, NetworkPlan, PairPlan


def network_plan(cluster: Cluster) -> NetworkPlan:
    """Return the network to build."""
    return NetworkPlan(
        hosts=cluster.hosts,
        congestion_control=cluster.congestion_control,
        links=tuple(link_plan(cluster, link.name) for link in cluster.links),
        inside_bps=parse_rate_bps(cluster.inside),
    )


def link_plan(cluster: Cluster, link: str) -> LinkPlan:
    """Return the initial values of one link."""
    hosts = range(cluster.hosts)
    ways = [cluster.attachment(host, link) for host in hosts]
    rates = [cluster.rate_bps(host, link) for host in hosts]
    uplinks = [cluster.uplink_bps(host, link) for host in hosts]
    own = [None if up == rate else up or UNSHAPED for up, rate in zip(uplinks, rates, strict=True)]
    pairs = tuple(_pair_plan(pair, link) for pair in cluster.pairs if _concerns(pair, link))
    uniform = len({(way.latency_s, way.loss) for way in ways}) == 1
    index = cluster.link_index(link)
    changing = any(
        change.link == index and (change.pair is not None or set(change.values) - {"rate_bps"})
        for change in change_plans(cluster)
    )
    return LinkPlan(
        name=link,
        rates_bps=tuple(rates),
        uplinks_bps=tuple(own) if any(up is not None for up in own) else (),
        latencies_s=tuple(way.latency_s for way in ways),
        losses=tuple(way.loss for way in ways),
        pairs=pairs,
        switched=bool(pairs) or not uniform or changing,
    )


def _concerns(pair: Pair, link: str) -> bool:
    return link in {*pair.rates, *pair.latencies, *pair.losses}


def _pair_plan(pair: Pair, link: str) -> PairPlan:
    latency, loss = pair.latencies.get(link), pair.losses.get(link)
    return PairPlan(
        hosts=pair.hosts,
        rate_bps=parse_rate_bps(pair.rates.get(link)),
        latency_s=None if latency is None else parse_time_s(latency),
        loss=None if loss is None else parse_loss(loss),
    )


def change_plans(cluster: Cluster) -> Iterator[ChangePlan]:
    """Yield the changes of a launch: one for each link that a change names."""
    for number, change in enumerate(cluster.changes):
        for index, link in enumerate(cluster.links):
            if change.link in (None, link.name):
                yield ChangePlan(
                    at_s=change.at_s,
                    link=index,
                    values=_values(change),
                    hosts=change.hosts,
                    pair=change.pair,
                    number=number,
                )


def _values(change: Change) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if change.rate is not None:
        values["rate_bps"] = parse_rate_bps(change.rate)
    if change.latency is not None:
        values["latency_s"] = parse_time_s(change.latency)
    if change.loss is not None:
        values["loss"] = parse_loss(change.loss)
    return values
