"""Conversion of a given profile to the cluster of a run.

Differences in rate, number of ranks and pace are computed. Other differences are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from offbeat.core.measuring.processors import processors
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, network_rate_bps
from offbeat.core.profile.facts import Link
from offbeat.core.sim.ranks import Ranks
from offbeat.lab import Cluster
from offbeat.lab.description import Way
from offbeat.lab.units import format_rate, format_rounded_rate, format_time

EXACT = 1.01  # largest ratio of two recorded rates that count as equal
ESTIMATED = 1.5  # largest such ratio if one of the rates is estimated from message payloads
Pace = float | Literal["auto", "none"] | None


@dataclass(frozen=True)
class ConvertedProfile:
    """A profile for the cluster of a run.

    Attributes:
        profile: the converted profile.
        quantities: (quantity, measured value, value here) of each computed quantity.
        compared: False if the network of the run is not known, as without a lab.
        crowded: number of ranks if they share fewer processors without a pace, else 0.
        file: path of the given profile.
    """

    profile: Profile
    quantities: tuple[tuple[str, str, str], ...] = ()
    compared: bool = True
    crowded: int = 0
    file: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Report of the conversion in one or two lines for the terminal."""
        if self.quantities:
            changed = ", ".join(f"{what} {was} -> {here}" for what, was, here in self.quantities)
            line = (
                f"{self.file} was measured on another cluster; its numbers are computed for this "
                f"one: {changed}"
            )
        elif not self.compared:
            line = f"{self.file} is used as it is: the network of this run is not known"
        else:
            line = f"{self.file} was measured on such a cluster"
        if not self.crowded:
            return line
        return (
            f"{line}\nwarning: {self.crowded} ranks share {processors()} processors, and the "
            "profile has no pace; compute takes longer than predicted unless layers only sleep "
            "(add --pace K)"
        )

    def record(self) -> dict[str, Any]:
        """Return the JSON form for run.json."""
        return {
            "file": self.file,
            "compared": self.compared,
            "crowded": self.crowded,
            "computed": [
                {"quantity": what, "measured": was, "here": here}
                for what, was, here in self.quantities
            ],
            "text": self.text,
        }


def replicas_of(cluster: Cluster, ranks: int) -> int:
    """Return the number of replicas on the hosts of the first `ranks` ranks."""
    return ranks if cluster.ranks is None else cluster.host_of(ranks - 1) + 1


def with_network(profile: Profile, cluster: Cluster, ranks: int) -> Profile:
    """Return the profile with the configured rate, delay and loss of each link."""
    hosts = range(cluster.host_of(ranks - 1) + 1)
    return replace(
        profile, links=tuple(_with_way(x, worst_way(cluster, hosts, x.name)) for x in profile.links)
    )


def compute_for(
    profile: Profile, cluster: Cluster, ranks: int, *, shaped: bool, pace: Pace, file: str
) -> ConvertedProfile:
    """Convert a profile to `ranks` ranks on a cluster.

    Args:
        profile: the given profile.
        cluster: cluster of the run.
        ranks: number of ranks that train.
        shaped: whether the lab shapes the links, so that their rates are known.
        pace: pace of the run, as in `Setup.pace`.
        file: path of the profile, for messages.

    Raises:
        ValueError: links, delay, loss, host speeds or pace differ in a way that no formula covers.
    """
    quantities: list[tuple[str, str, str]] = []
    _require_nodes(profile, cluster, file)
    if shaped:
        _require_links(profile, cluster, file)
    rates: dict[str, float] = {}
    hosts, all_ranks = range(cluster.host_of(ranks - 1) + 1), ranks
    ranks = replicas_of(cluster, ranks)
    ways = {link.name: worst_way(cluster, hosts, link.name) for link in cluster.links}
    for link in profile.links if shaped and min(ranks, profile.world_size) > 1 else ():
        way = ways[link.name]
        _require_delay(link, way, profile.world_size, file)
        known = link.asked_rate_bps is not None
        measured_bps = network_rate_bps(link, profile.world_size)
        if way.rate_bps is None:
            if known:
                raise ValueError(
                    f"rate of link {link.name!r} (unlimited) must be a number for {file}, which "
                    f"was measured at {format_rounded_rate(measured_bps)}; give a rate, or measure "
                    "it again with `offbeat profile`"
                )
        elif _ratio(measured_bps, way.rate_bps) > (EXACT if known else ESTIMATED):
            rates[link.name] = way.rate_bps
            about = "" if known else "about "
            was = about + format_rounded_rate(measured_bps)
            quantities.append((f"rate of {link.name}", was, format_rate(way.rate_bps)))
    before = profile.world_size
    if ranks != before:
        if min(ranks, before) < 2:
            raise ValueError(
                f"world_size ({before}) of {file} must be the cluster's number of ranks ({ranks}) "
                "where either is 1; measure it again with `offbeat profile`"
            )
        quantities.append(("ranks", str(before), str(ranks)))
    made = extrapolate(profile, hosts=ranks, rate_bps=rates or None)
    if shaped:
        made = with_network(made, cluster, all_ranks)
    made = _with_pace(made, before, cluster, pace, file, quantities)
    _require_speeds(made, cluster, file)
    crowded = shaped and not made.pace and all_ranks > processors()
    return ConvertedProfile(made, tuple(quantities), shaped, all_ranks if crowded else 0, file)


def worst_way(cluster: Cluster, hosts: Iterable[int], link: str) -> Way:
    """Return the smallest rate, longest delay and greatest loss of a link between some hosts.

    A ring all-reduce is limited by these.
    """
    hosts = list(hosts)
    ways = [cluster.attachment(host, link) for host in hosts]
    ways += [
        cluster.way(*pair.hosts, link) for pair in cluster.pairs if set(pair.hosts) <= {*hosts}
    ]
    rates = [way.rate_bps for way in ways if way.rate_bps is not None]
    return Way(
        min(rates, default=None), max(way.latency_s for way in ways), max(way.loss for way in ways)
    )


def ranks_on(cluster: Cluster, replicas: int, *, served: Iterable[int] = ()) -> Ranks:
    """Return the rates of the ranks on a cluster relative to the slowest way, at which collectives
    run; for strategies whose ranks do not wait for each other.

    Links with values of pairs, and links without a rate, have no rates of single ranks.

    Args:
        cluster: cluster of the ranks.
        replicas: number of replicas.
        served: hosts of the servers; empty: a server is connected as the best host.
    """
    of_rank = [rank if cluster.ranks else cluster.host_of(rank) for rank in range(replicas)]
    sent, received, servers = {}, {}, {}
    for link in (one.name for one in cluster.links):
        worst_bps = worst_way(cluster, of_rank, link).rate_bps
        if worst_bps is None or any(link in pair.rates for pair in cluster.pairs):
            continue
        up, down = (
            {host: bps(host, link) or math.inf for host in (*of_rank, *served)}
            for bps in (cluster.uplink_bps, cluster.rate_bps)
        )
        if math.inf in {*up.values(), *down.values()} or {*up.values(), *down.values()} == {
            worst_bps
        }:
            continue
        sent[link] = tuple(up[host] / worst_bps for host in of_rank)
        received[link] = tuple(down[host] / worst_bps for host in of_rank)
        hosts = list(served)
        choose = min if hosts else max
        send, receive = (choose(bps[host] for host in hosts or of_rank) for bps in (up, down))
        servers[link] = send / worst_bps, receive / worst_bps
    return Ranks(link_rates=sent, receive_rates=received, server_rates=servers)


def _with_way(link: Link, way: Way) -> Link:
    if way.rate_bps is None:
        return replace(link, asked_rate_bps=None, asked_latency_s=0.0, asked_loss=0.0)
    return replace(
        link,
        asked_rate_bps=way.rate_bps,
        asked_latency_s=way.latency_s,
        asked_loss=way.loss,
    )


def _require_links(profile: Profile, cluster: Cluster, file: str) -> None:
    names, here = ([link.name for link in links] for links in (profile.links, cluster.links))
    if names != here:
        raise ValueError(
            f"links ({', '.join(names)}) of {file} must be the cluster's ({', '.join(here)}); "
            "rename the links of the cluster, or measure the profile again with `offbeat profile`"
        )


def _require_nodes(profile: Profile, cluster: Cluster, file: str) -> None:
    """Raise ValueError if replicas of the profile have other numbers of ranks than the hosts."""
    sizes = {cluster.ranks_of(host) for host in range(cluster.hosts)} if cluster.ranks else {1}
    if sizes == {1}:
        sizes = set()
    if set(profile.topology) != sizes:
        was, here = sorted(profile.topology and {*profile.topology}), sorted(sizes)
        raise ValueError(
            f"ranks per replica ({was or 1}) of {file} must be those of the cluster's hosts "
            f"({here or 1}); measure the profile again with `offbeat profile`"
        )


def _require_delay(link: Link, way: Way, ranks: int, file: str) -> None:
    """Raise ValueError if the delay or loss of a link differs from the profile's.

    If the profile does not record them, its message latency must be at least N - 1 one-way delays,
    half of the delays of a ring all-reduce of N ranks.
    """
    again = "measure the profile again with `offbeat profile`"
    if link.asked_rate_bps is None:
        least_s = (ranks - 1) * way.latency_s
        if link.latency_s < least_s:
            raise ValueError(
                f"latency_s ({link.latency_s:.4g}) of link {link.name!r} of {file} must be at "
                f"least {least_s:.4g} s with a delay of {format_time(way.latency_s)} each way; "
                f"{again}"
            )
        return
    for name, was, here in (
        ("latency", link.asked_latency_s, way.latency_s),
        ("loss", link.asked_loss, way.loss),
    ):
        if not math.isclose(was, here, rel_tol=EXACT - 1):
            raise ValueError(
                f"{name} of link {link.name!r} ({here:g}) must be that of {file} ({was:g}); {again}"
            )


def _with_pace(
    profile: Profile,
    before: int,
    cluster: Cluster,
    pace: Pace,
    file: str,
    quantities: list[tuple[str, str, str]],
) -> Profile:
    """Return the profile at the pace of the run. More ranks than profiled raise the pace."""
    if isinstance(pace, (int, float)):
        if profile.pace:
            return profile.with_pace(pace)
        return profile.with_pace(pace, *_host_speeds(profile, cluster))
    if (pace == "auto" and not profile.pace) or (pace == "none" and profile.pace):
        raise ValueError(
            f"pace ({pace}) must be that of {file} ({profile.pace:g}; 0 is none); leave --pace "
            "out, or measure a profile with it"
        )
    more = profile.world_size / before
    if more <= 1 or not profile.pace:
        return profile
    slower = math.ceil(10 * profile.pace * more) / 10
    quantities.append(("pace", f"{profile.pace:g}", f"{slower:g}"))
    return profile.with_pace(slower)


def _require_speeds(profile: Profile, cluster: Cluster, file: str) -> None:
    """Raise ValueError if speeds or jitters of a paced profile differ from the cluster's, or if the
    cluster has them and the profile has no pace."""
    speeds, jitters = _host_speeds(profile, cluster)
    if not profile.pace:
        if any(jitters) or any(speed != 1 for speed in speeds):
            raise ValueError(
                f"speed and jitter of the cluster's hosts need a pace, and {file} has none; add "
                "--pace K, or leave the profile out"
            )
        return
    times = [1 / speed for speed in speeds]
    scale = [time * len(times) / sum(times) for time in times]
    for name, was, here in (
        ("speeds", profile.rank_scale or (1.0,) * len(scale), scale),
        ("jitters", profile.jitters, jitters),
    ):
        if any(not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(was, here, strict=True)):
            raise ValueError(
                f"{name} of the cluster's hosts must be those of {file}; measure the profile again "
                "with `offbeat profile`"
            )


def _host_speeds(profile: Profile, cluster: Cluster) -> tuple[list[float], list[float]]:
    """Return speed and jitter of the host of each replica."""
    replicas = range(profile.world_size)
    hosts = [cluster.host_of(r) if cluster.ranks is None else r for r in replicas]
    return [*map(cluster.speed_of, hosts)], [*map(cluster.jitter_of, hosts)]


def _ratio(one: float, other: float) -> float:
    return max(one / other, other / one)
