"""Conversion of a profile to a cluster.

To that of a run (`compute_for`) differences in rate, number of ranks and pace are computed, and
other differences are refused. For predictions messages can be estimated (`estimate_for`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from offbeat.core.measuring.processors import processors
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, network_rate_bps
from offbeat.core.profile.facts import Link
from offbeat.core.sim.ranks import Ranks
from offbeat.core.units import format_rate, format_rounded_rate, format_time
from offbeat.elastic.profile import with_slower_replicas
from offbeat.experiments.elsewhere import described_link, on_links, require_equal_sizes
from offbeat.lab import Cluster
from offbeat.lab.description import Way

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


@dataclass(frozen=True)
class Hosts:
    """What a cluster description states of the replicas that train on its hosts.

    Attributes:
        ways: the slowest way of each link, the default link first.
        sizes: numbers of ranks of a replica on the hosts, in ascending order.
        speeds: relative speed of each replica's host.
        jitters: jitter of each replica's host.
    """

    ways: Mapping[str, Way]
    sizes: tuple[int, ...]
    speeds: tuple[float, ...]
    jitters: tuple[float, ...]

    @classmethod
    def of(cls, cluster: Cluster, ranks: int) -> Hosts:
        """Return what a cluster states of its first `ranks` ranks."""
        replicas = range(replicas_of(cluster, ranks))
        of_replica = [r if cluster.ranks else cluster.host_of(r) for r in replicas]
        hosts = range(cluster.host_of(ranks - 1) + 1)
        sizes = {cluster.ranks_of(host) if cluster.ranks else 1 for host in range(cluster.hosts)}
        return cls(
            {link.name: worst_way(cluster, hosts, link.name) for link in cluster.links},
            tuple(sorted(sizes)),
            tuple(map(cluster.speed_of, of_replica)),
            tuple(map(cluster.jitter_of, of_replica)),
        )


def with_network(profile: Profile, cluster: Cluster, ranks: int) -> Profile:
    """Return the profile with the configured rate, delay and loss of each link."""
    ways = Hosts.of(cluster, ranks).ways
    return replace(profile, links=tuple(_with_way(link, ways[link.name]) for link in profile.links))


def _with_way(link: Link, way: Way) -> Link:
    way = Way(None, 0.0, 0.0) if way.rate_bps is None else way
    return replace(
        link, asked_rate_bps=way.rate_bps, asked_latency_s=way.latency_s, asked_loss=way.loss
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
    here = Hosts.of(cluster, ranks)
    _require_same("ranks per replica", here.sizes, sorted({*profile.topology}) or [1], file)
    if shaped:
        _require_same("links", here.ways, [link.name for link in profile.links], file)
    rates: dict[str, float] = {}
    all_ranks, ranks = ranks, len(here.speeds)
    for link in profile.links if shaped and min(ranks, profile.world_size) > 1 else ():
        way = here.ways[link.name]
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
    made = _with_pace(made, ranks / before, here, pace, file)
    if made.pace != profile.pace and not isinstance(pace, (int, float)):
        quantities.append(("pace", f"{profile.pace:g}", f"{made.pace:g}"))
    _require_speeds(made, here, file)
    crowded = shaped and not made.pace and all_ranks > processors()
    return ConvertedProfile(made, tuple(quantities), shaped, all_ranks if crowded else 0, file)


def estimate_for(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile of replicas on a cluster, with messages estimated from rates and delays.

    A message between all machines is as slow as the slowest way between two of them, so the
    smallest rate, mostly that of an uplink, the longest delay and the greatest loss count. Speeds
    and jitter of hosts count relative to the measured device.

    Args:
        profile: measured profile of replicas.
        cluster: description of the machines.

    Raises:
        ValueError: the cluster has a link without a rate, unequal numbers of ranks on its hosts, or
            several replicas on a host.
    """
    if cluster.processes_per_host > 1:
        raise ValueError(
            f"processes_per_host ({cluster.processes_per_host}) must be 1 for a prediction or a "
            "rehearsal; write as many hosts as replicas, or ranks for ranks that share one"
        )
    here, links = Hosts.of(cluster, cluster.world_size), list[Link]()
    require_equal_sizes(here.sizes, "ranks of the hosts")
    for name, way in here.ways.items():
        if way.rate_bps is None:
            raise ValueError(
                f"rate of link {name!r} (unlimited) must be a number, as messages are "
                "estimated from it; give the link a rate"
            )
        rate_bps = float(way.rate_bps)
        links.append(described_link(name, cluster.hosts, rate_bps, way.latency_s, way.loss))
    even = replace(profile, rank_scale=(), rank_jitter=())
    made = on_links(even, cluster.hosts, links)
    made = with_slower_replicas(made, [1 / speed for speed in here.speeds])
    return replace(made, rank_jitter=here.jitters if any(here.jitters) else ())


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
        rates = {*up.values(), *down.values()}
        if math.inf in rates or rates == {worst_bps}:
            continue
        sent[link] = tuple(up[host] / worst_bps for host in of_rank)
        received[link] = tuple(down[host] / worst_bps for host in of_rank)
        hosts = list(served)
        choose = min if hosts else max
        send, receive = (choose(bps[host] for host in hosts or of_rank) for bps in (up, down))
        servers[link] = send / worst_bps, receive / worst_bps
    return Ranks(link_rates=sent, receive_rates=received, server_rates=servers)


def _require_same(what: str, here: Iterable[Any], was: Iterable[Any], file: str) -> None:
    """Raise ValueError if values of the cluster differ from those of the profile."""
    here, was = list(here), list(was)
    pairs = zip(here, was, strict=False)
    same = (a == b or (isinstance(a, float) and _ratio(a, b) <= EXACT) for a, b in pairs)
    if len(here) != len(was) or not all(same):
        one, other = (
            ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
            for values in (here, was)
        )
        raise ValueError(
            f"{what} ({one}) must be as in {file} ({other}); change the cluster, or measure the "
            "profile again with `offbeat profile`"
        )


def _require_delay(link: Link, way: Way, ranks: int, file: str) -> None:
    """Raise ValueError if the delay or loss of a link differs from the profile's.

    If the profile does not record them, its message latency must be at least N - 1 one-way delays,
    half of the delays of a ring all-reduce of N ranks.
    """
    if link.asked_rate_bps is None:
        least_s = (ranks - 1) * way.latency_s
        if link.latency_s < least_s:
            raise ValueError(
                f"latency_s ({link.latency_s:.4g}) of link {link.name!r} of {file} must be at "
                f"least {least_s:.4g} s with a delay of {format_time(way.latency_s)} each way; "
                "measure the profile again with `offbeat profile`"
            )
        return
    _require_same(f"latency of link {link.name!r}", [way.latency_s], [link.asked_latency_s], file)
    _require_same(f"loss of link {link.name!r}", [way.loss], [link.asked_loss], file)


def _with_pace(profile: Profile, more: float, here: Hosts, pace: Pace, file: str) -> Profile:
    """Return the profile at the pace of the run. `more` times as many ranks as profiled raise the
    pace."""
    if isinstance(pace, (int, float)):
        return profile.with_pace(pace, *(() if profile.pace else (here.speeds, here.jitters)))
    if (pace == "auto" and not profile.pace) or (pace == "none" and profile.pace):
        raise ValueError(
            f"pace ({pace}) must be that of {file} ({profile.pace:g}; 0 is none); leave --pace "
            "out, or measure a profile with it"
        )
    if more <= 1 or not profile.pace:
        return profile
    return profile.with_pace(math.ceil(10 * profile.pace * more) / 10)


def _require_speeds(profile: Profile, here: Hosts, file: str) -> None:
    """Raise ValueError if speeds or jitters of a paced profile differ from the cluster's, or if the
    cluster has them and the profile has no pace."""
    if not profile.pace:
        if any(here.jitters) or {*here.speeds} != {1.0}:
            raise ValueError(
                f"speed and jitter of the cluster's hosts need a pace, and {file} has none; add "
                "--pace K, or leave the profile out"
            )
        return
    mean = fmean(1 / speed for speed in here.speeds)
    scale = [1 / speed / mean for speed in here.speeds]
    _require_same("compute times by speed of the hosts", scale, profile.scale_of_ranks, file)
    _require_same("jitter of the hosts", here.jitters, profile.jitters, file)


def _ratio(one: float, other: float) -> float:
    return max(one, other) / min(one, other) if one and other else math.inf
