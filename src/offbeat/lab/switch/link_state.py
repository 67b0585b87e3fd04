"""Values of a network and its links: rates, delays and losses of hosts and pairs of hosts.

It uses only the standard library, because the supervisor imports it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

UNSHAPED = 0  # in `LinkPlan.uplinks_bps`


@dataclass(frozen=True, slots=True)
class Way:
    """Configured values of one host's attachment to a link, or of the way between two hosts.

    Attributes:
        rate_bps: bits per second, of an attachment in the slower direction; None if unshaped.
        latency_s: one-way delay in seconds.
        loss: share of packets that are lost.
    """

    rate_bps: int | None
    latency_s: float
    loss: float


@dataclass(frozen=True)
class PairPlan:
    """Values between two hosts, in both directions; None: those of the hosts.

    Attributes:
        hosts: numbers of the two hosts.
        rate_bps: additional rate limit in bit/s.
        latency_s: one-way delay in seconds.
        loss: share of packets that are lost.
    """

    hosts: tuple[int, int]
    rate_bps: int | None = None
    latency_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class LinkPlan:
    """Values of one link.

    Between two hosts the larger latency and loss apply, unless the pair has its own values.

    Attributes:
        name: name of the link.
        rates_bps: rate of each host in bit/s; None: unshaped.
        uplinks_bps: rate at which each host sends, if it differs; None: that of `rates_bps`, also
            after its changes; `UNSHAPED`: unshaped.
        latencies_s: one-way delay of each host in seconds.
        losses: share of lost packets of each host.
        pairs: values between two hosts that differ.
        switched: whether hosts or pairs differ, or will differ, in a value that requires the switch
            in user space.
    """

    name: str
    rates_bps: tuple[int | None, ...]
    latencies_s: tuple[float, ...]
    losses: tuple[float, ...]
    pairs: tuple[PairPlan, ...] = ()
    switched: bool = False
    uplinks_bps: tuple[int | None, ...] = ()

    @property
    def has_delay_or_loss(self) -> bool:
        """Whether any packet is delayed or lost."""
        values = [value for pair in self.pairs for value in (pair.latency_s, pair.loss)]
        return any((*self.latencies_s, *self.losses, *values))

    @property
    def has_loss(self) -> bool:
        """Whether any packet is lost."""
        return any((*self.losses, *(pair.loss for pair in self.pairs)))

    def uplink_bps(self, host: int) -> int | None:
        """Return the rate at which a host sends in bit/s; None: unshaped."""
        own = self.uplinks_bps[host] if self.uplinks_bps else None
        return self.rates_bps[host] if own is None else own or None

    def pair(self, one: int, other: int) -> PairPlan:
        """Return the values of a pair of hosts."""
        return next(
            (pair for pair in self.pairs if set(pair.hosts) == {one, other}), PairPlan((one, other))
        )

    def latency_s(self, one: int, other: int) -> float:
        """Return the one-way delay between two hosts in seconds."""
        own = self.pair(one, other).latency_s
        return max(self.latencies_s[one], self.latencies_s[other]) if own is None else own

    def loss(self, one: int, other: int) -> float:
        """Return the share of packets that are lost between two hosts."""
        own = self.pair(one, other).loss
        return max(self.losses[one], self.losses[other]) if own is None else own


@dataclass(frozen=True)
class ChangePlan:
    """New values of one link at a time.

    Attributes:
        at_s: seconds after the start of the ranks.
        link: index of the link.
        values: the changed ones of `rate_bps`, `latency_s` and `loss`.
        hosts: hosts whose values change; None: all hosts.
        pair: the two hosts between which values change.
        number: index of the cluster's change to which this belongs.
    """

    at_s: float
    link: int
    values: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[int] | None = None
    pair: tuple[int, int] | None = None
    number: int = 0

    def apply_to(self, plan: LinkPlan) -> LinkPlan:
        """Return the plan of the link after this change."""
        if self.pair is not None:
            old = plan.pair(*self.pair)
            others = tuple(pair for pair in plan.pairs if pair != old)
            return replace(plan, pairs=(*others, replace(old, **self.values)))
        hosts = range(len(plan.rates_bps)) if self.hosts is None else self.hosts
        names = {"rate_bps": "rates_bps", "latency_s": "latencies_s", "loss": "losses"}
        rows = {
            names[name]: tuple(
                value if host in hosts else old
                for host, old in enumerate(getattr(plan, names[name]))
            )
            for name, value in self.values.items()
        }
        return replace(plan, **rows)


@dataclass(frozen=True)
class NetworkPlan:
    """Network to build.

    Attributes:
        hosts: number of hosts.
        congestion_control: TCP congestion control; "default" keeps that of the kernel.
        links: initial values of each link.
        inside_bps: rate of each host's loopback in bit/s; None for an unshaped one.
    """

    hosts: int
    congestion_control: str
    links: tuple[LinkPlan, ...]
    inside_bps: int | None = None
