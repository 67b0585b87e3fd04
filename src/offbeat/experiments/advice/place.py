"""Machines that advice is for, and the network between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offbeat.core.profile import Link, Profile
from offbeat.core.profile.elsewhere import (
    extrapolate,
    network_rate_bps,
    tcp_rate_bps,
    with_free_links,
)
from offbeat.core.profile.facts import scaled_compute
from offbeat.elastic.profile import for_members
from offbeat.experiments.elsewhere import described_link, on_links, with_free_nodes, with_passes
from offbeat.experiments.profile_for_network import estimate_for
from offbeat.lab import Cluster

MOST_CONNECTIONS = 16


@dataclass(frozen=True)
class Place:
    """Machines with a network between them. A machine trains one replica of the model.

    Attributes:
        profile: profile with one replica per machine.
        devices: number of devices of each machine, which share its replica. Messages inside a
            machine count as free.
        estimated: whether message times follow from rates instead of measurements.
        measured_passes: backward passes per step of one machine alone. Several machines have those
            of the profile, which are fewer if the script divides its accumulation by their number.
    """

    profile: Profile
    devices: int = 1
    estimated: bool = False
    measured_passes: int | None = None

    @property
    def machines(self) -> int:
        """Return the number of machines."""
        return self.profile.world_size

    @property
    def batches(self) -> float:
        """Return the samples of an iteration of all machines, in batches of one machine alone."""
        passes = self.profile.usage.backwards
        return self.machines * passes / (self.measured_passes or passes)

    def with_passes(self, passes: int) -> Place:
        """Return the place whose machines have another number of backward passes per step."""
        measured, profile = self.profile.usage.backwards, with_passes(self.profile, passes)
        return replace(self, profile=profile, measured_passes=measured)

    @property
    def rate_bps(self) -> float:
        """Return the rate of the network of the slowest machine, in bits per second."""
        return network_rate_bps(self.profile.default_link, self.machines)

    def at_rate(self, rate_bps: float) -> Place:
        """Return the place with another rate of the default network, and their delay and loss.

        The rates of further networks change by the same factor.
        """
        profile, times = self.profile, rate_bps / self.rate_bps
        first, *more = profile.links
        rates = {link.name: network_rate_bps(link, self.machines) * times for link in more}
        there = extrapolate(profile, rate_bps={first.name: rate_bps, **rates})
        return replace(self, profile=there, estimated=True)

    def with_connections(self) -> tuple[int, Place] | None:
        """Return the number of TCP connections per link with which estimated messages reach the
        rates of their networks, at most `MOST_CONNECTIONS`, and the place with them; None if loss
        and delay do not limit the rates."""
        links, ranks = self.profile.links, self.machines
        count = max(
            math.ceil(link.connections * network_rate_bps(link, ranks) / reached_bps(link, ranks))
            for link in links
        )
        count = min(count, MOST_CONNECTIONS)
        if not self.estimated or count <= max(link.connections for link in links):
            return None
        more = tuple(replace(link, connections=count) for link in links)
        there = replace(self, profile=replace(self.profile, links=more))
        return count, there.at_rate(self.rate_bps)

    def with_machines(self, count: int) -> Place:
        """Return the place with another number of machines; properties of machines repeat."""
        return replace(self, profile=extrapolate(self.profile, hosts=count))

    def without_slowest(self) -> Place | None:
        """Return the place without its slowest machine; None if all are equal or two are left."""
        scale = self.profile.rank_scale
        if not scale or max(scale) == min(scale) or self.machines < 3:
            return None
        kept = [*range(self.machines)]
        kept.remove(scale.index(max(scale)))
        return replace(self, profile=for_members(self.profile, len(kept), kept))

    def with_even_times(self) -> Place | None:
        """Return the place with batches in proportion to the speeds of the machines, and the same
        samples per iteration; None if all machines are equal.

        An iteration of N machines then takes `N / sum(1 / s_i)` times the mean compute, for the
        compute times `s_i` of the machines relative to the mean.
        """
        scale = self.profile.rank_scale
        if not scale or max(scale) == min(scale):
            return None
        times = len(scale) / sum(1 / one for one in scale)
        profile = replace(self.profile, rank_scale=(), **scaled_compute(self.profile, times))
        return replace(self, profile=profile)

    @property
    def one_machine(self) -> Profile:
        """Return the profile of the fastest machine alone, which sends nothing. Its devices share
        its replica."""
        alone = with_free_links(self.fastest_machine)
        links = tuple(replace(link, asked_rate_bps=self.rate_bps) for link in alone.links)
        return replace(
            alone, links=links, world_size=1, topology=alone.topology[:1], rank_jitter=()
        )

    @property
    def fastest_machine(self) -> Profile:
        """Return the profile whose compute times are those of the fastest machine alone."""
        fastest, profile = min(self.profile.rank_scale, default=1.0), self.profile
        if self.measured_passes is not None:
            profile = with_passes(profile, self.measured_passes)
        return replace(profile, rank_scale=(), **scaled_compute(profile, fastest))


def reached_bps(link: Link, ranks: int) -> float:
    """Return the rate that TCP reaches on all connections of a link together, by its delay and
    loss."""
    rate_bps = network_rate_bps(link, ranks)
    return tcp_rate_bps(rate_bps, link.asked_latency_s, link.asked_loss, link.connections)


def place_on_cluster(
    profile: Profile, cluster: Cluster, devices: int = 1, measured_devices: int = 1
) -> Place:
    """Return the place of a cluster description.

    Arguments are those of `place_of`; `devices` counts if it is above the file's number of ranks.

    Raises:
        ValueError: the cluster has one host, or its messages cannot be estimated.
    """
    _require_several(cluster.hosts)
    made = estimate_for(profile, cluster)
    devices = max(devices, cluster.ranks_of(0) if cluster.ranks else 1)
    return Place(with_free_nodes(made, devices, measured_devices), devices, estimated=True)


def place_of(
    profile: Profile,
    hosts: int | None,
    rate_bps: float | None,
    devices: int = 1,
    measured_devices: int = 1,
) -> Place:
    """Return the place of a number of machines with one network.

    Args:
        profile: measured profile of the model. If it is of several ranks, its measured message
            times are extrapolated; otherwise messages are estimated.
        hosts: number of machines; None for the profile's ranks.
        rate_bps: rate of the network in bits per second; None for the measured one.
        devices: number of devices of each machine.
        measured_devices: number of devices of each measured machine.

    Raises:
        ValueError: hosts or rate are missing for a profile of one rank, or one machine is left.
    """
    if profile.world_size > 1:
        made = extrapolate(profile, hosts=hosts, rate_bps=rate_bps)
    else:
        hosts, rate_bps = require_network(hosts, rate_bps)
        link = described_link(profile.default_link.name, hosts, rate_bps)
        made = on_links(profile, hosts, [link])
    estimated = rate_bps is not None or made.world_size != profile.world_size
    return Place(with_free_nodes(made, devices, measured_devices), devices, estimated)


def require_network(
    hosts: int | None, rate_bps: float | None, count_name: str = "hosts"
) -> tuple[int, float]:
    """Return the number of hosts and the rate, which describe the network for a profile of one
    rank.

    Args:
        hosts: number of hosts.
        rate_bps: rate of each link, in bit/s.
        count_name: name of the option for the number of hosts, for the message.

    Raises:
        ValueError: one of them is None, or there is one machine.
    """
    if hosts is None or rate_bps is None:
        facts = {count_name: hosts, "rate": rate_bps}
        missing = " and ".join(name for name, value in facts.items() if value is None)
        raise ValueError(
            f"{missing} (not given) must describe the network, because a profile of one device has "
            f"none; add --{count_name} 4 --rate 200mbit, or --cluster FILE"
        )
    _require_several(hosts)
    return hosts, rate_bps


def _require_several(hosts: int) -> None:
    if hosts < 2:
        raise ValueError(f"hosts ({hosts}) must be at least 2; one machine alone sends nothing")
