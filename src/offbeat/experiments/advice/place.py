"""Machines that advice is for, and the network between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from offbeat.core.plan import INSIDE
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import (
    FREE_BYTES_PER_S,
    extrapolate,
    network_rate_bps,
    with_free_links,
)
from offbeat.core.profile.facts import Link, scaled_compute
from offbeat.core.sim.ranks import Ranks
from offbeat.experiments.advice.other_networks import described_link, noise_of, on_links

if TYPE_CHECKING:  # lab is imported only for cluster files
    from offbeat.lab import Cluster


@dataclass(frozen=True)
class Place:
    """Machines with a network between them. A machine trains one replica of the model.

    Attributes:
        profile: profile with one replica per machine.
        devices: number of devices of each machine, which share its replica. Messages inside a
            machine count as free.
        estimated: whether message times follow from rates instead of measurements.
        ranks: rates of the machines, for strategies whose machines do not wait for each other.
        measured_passes: backward passes per step of one machine alone. Several machines have those
            of the profile, which are fewer if the script divides its accumulation by their number.
    """

    profile: Profile
    devices: int = 1
    estimated: bool = False
    ranks: Ranks = field(default_factory=Ranks)
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
        measured, profile = self.profile.usage.backwards, _with_passes(self.profile, passes)
        return replace(self, profile=profile, measured_passes=measured)

    @property
    def rate_bps(self) -> float:
        """Return the rate of the network of the slowest machine, in bits per second."""
        return network_rate_bps(self.profile.default_link, self.profile.world_size)

    def at_rate(self, rate_bps: float) -> Place:
        """Return the place with another rate of the default network, and their delay and loss.

        The rates of further networks change by the same factor.
        """
        profile, times = self.profile, rate_bps / self.rate_bps
        first, *more = profile.links
        rates = {link.name: network_rate_bps(link, self.machines) * times for link in more}
        there = extrapolate(profile, rate_bps={first.name: rate_bps, **rates})
        return replace(self, profile=there, estimated=True, ranks=Ranks())

    def with_connections(self, count: int) -> Place:
        """Return the place with a number of TCP connections per link."""
        links = tuple(replace(link, connections=count) for link in self.profile.links)
        return replace(self, profile=replace(self.profile, links=links)).at_rate(self.rate_bps)

    def with_machines(self, count: int) -> Place:
        """Return the place with another number of machines; properties of machines repeat."""
        return replace(self, profile=extrapolate(self.profile, hosts=count), ranks=Ranks())

    def without_slowest(self) -> Place | None:
        """Return the place without its slowest machine; None if all are equal or two are left."""
        scale = self.profile.rank_scale
        if not scale or max(scale) == min(scale) or self.machines < 3:
            return None
        slowest = scale.index(max(scale))
        kept = [machine for machine in range(len(scale)) if machine != slowest]
        fewer, jitters = extrapolate(self.profile, hosts=len(kept)), self.profile.rank_jitter
        kept_jitters = tuple(jitters[machine] for machine in kept) if jitters else ()
        even = replace(fewer, rank_scale=(), rank_jitter=kept_jitters)
        profile = _with_times(even, [scale[machine] for machine in kept])
        return replace(self, profile=profile, ranks=Ranks())

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
    def by_device(self) -> Profile:
        """Return the profile with one rank per device, for methods that shard over all devices."""
        if self.devices == 1:
            return self.profile
        whole = self.profile.of_replicas()
        flat = extrapolate(whole, hosts=self.machines * self.devices)
        scale, jitter = (
            tuple(value for value in values for _ in range(self.devices))
            for values in (self.profile.rank_scale, self.profile.rank_jitter)
        )
        return replace(flat, rank_scale=scale, rank_jitter=jitter)

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
            profile = _with_passes(profile, self.measured_passes)
        return replace(profile, rank_scale=(), **scaled_compute(profile, fastest))


def _with_passes(profile: Profile, passes: int) -> Profile:
    """Return the profile with another number of backward passes per step. `other_s` contains all
    passes but the last one."""
    more_s = (passes - profile.usage.backwards) * (profile.forward_s + profile.backward_s)
    usage = replace(profile.usage, backwards=passes)
    return replace(profile, other_s=max(0.0, profile.other_s + more_s), usage=usage)


def _with_times(profile: Profile, times: Sequence[float]) -> Profile:
    """Return the profile of equal machines with the compute of each multiplied by a factor."""
    if {*times} == {1.0}:
        return profile
    mean = fmean(times)
    scale = tuple(one / mean for one in times)
    return replace(profile, rank_scale=scale, **scaled_compute(profile, mean))


def place_on_cluster(
    profile: Profile, cluster: Cluster, devices: int = 1, measured_devices: int = 1
) -> Place:
    """Return the place of a cluster description.

    A message between all machines is as slow as the slowest way between two of them, so the
    smallest rate, mostly that of an uplink, the longest delay and the greatest loss count. Gossip
    and servers use the rates of each machine. Speeds and jitter of hosts count relative to the
    measured device.

    Args:
        profile: measured profile of the model.
        cluster: description of the machines.
        devices: number of devices of each machine, if it is above the file's number of ranks.
        measured_devices: number of devices of each measured machine.

    Raises:
        ValueError: the cluster has one host, a link without a rate, unequal numbers of ranks on its
            hosts, or several replicas on a host.
    """
    from offbeat.experiments.profile_for_network import Hosts, ranks_on

    _require_several(cluster.hosts)
    if cluster.processes_per_host > 1:
        raise ValueError(
            f"processes_per_host ({cluster.processes_per_host}) must be 1 for a prediction or a "
            "rehearsal; write as many hosts as replicas, or ranks for ranks that share one"
        )
    here, count = Hosts.of(cluster, cluster.world_size), cluster.hosts
    require_equal_sizes(here.sizes, "ranks of the hosts")
    links = []
    for name, way in here.ways.items():
        if way.rate_bps is None:
            raise ValueError(
                f"rate of link {name!r} (unlimited) must be a number, as messages are "
                "estimated from it; give the link a rate"
            )
        rate_bps = float(way.rate_bps)
        links.append(described_link(name, count, rate_bps, way.latency_s, way.loss))
    one = replace(profile, rank_scale=(), rank_jitter=())
    made = _with_times(on_links(one, count, links), [1 / speed for speed in here.speeds])
    made = replace(made, rank_jitter=here.jitters if any(here.jitters) else ())
    devices = max(devices, *here.sizes)
    made = with_free_nodes(made, devices, measured_devices)
    return Place(made, devices, estimated=True, ranks=ranks_on(cluster, count))


def with_free_nodes(profile: Profile, devices: int, measured_devices: int = 1) -> Profile:
    """Return the profile whose replicas each have some ranks, with free messages between them.

    Args:
        profile: profile of replicas.
        devices: number of ranks of each replica.
        measured_devices: number of ranks of a replica as the noise of gradients was measured.
    """
    if devices == measured_devices == 1:
        return profile
    return replace(
        profile,
        topology=(devices,) * profile.world_size if devices > 1 else (),
        inside=Link(INSIDE, 0.0, FREE_BYTES_PER_S) if devices > 1 else None,
        noise=noise_of(profile, measured_devices / devices),
    )


def require_equal_sizes(sizes: Sequence[int], name: str) -> None:
    """Raise ValueError unless all machines have as many devices.

    Args:
        sizes: number of devices of each machine.
        name: what `sizes` are, for the message.
    """
    if len({*sizes}) > 1:
        listed = ", ".join(map(str, sizes))
        raise ValueError(
            f"{name} ({listed}) must be equal, as unequal machines are not predicted; leave out "
            "the smaller ones, or describe them with the ranks that all have"
        )


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
