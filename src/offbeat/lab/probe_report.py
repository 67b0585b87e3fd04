"""Configured and measured values of a cluster's links, and the deviations between them.

A way is the direction from one host to another on one link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from offbeat.core.units import format_rate, format_rounded_rate, format_time
from offbeat.lab.addressing import address
from offbeat.lab.errors import LabError
from offbeat.lab.switch.link_state import Way

if TYPE_CHECKING:  # the process that measures does without pydantic
    from offbeat.lab.description import Cluster

MOST_WAYS = 8  # largest number of measured ways if hosts and links are alike
MOST_DISTINCT = 64  # largest number of measured ways with different rates and delays
TOLERANCE = 0.1  # accepted deviation as a share of the configured value

LEAST_SHARE = 0.9  # required share of the configured total rate
# total rate in bit/s up to which no check is needed: two cores can forward it
UNCHECKED_BPS = 800_000_000
TRIES = 3  # other load of the machine varies, so use the best of several tries


@dataclass(frozen=True)
class ProbeTarget:
    """Way between two hosts on a link that is to be measured.

    Attributes:
        link: name of the link.
        hosts: sending and receiving host.
        to_address: address of the receiving host.
        way: configured values.
    """

    link: str
    hosts: tuple[int, int]
    to_address: str
    way: Way


def _target(cluster: "Cluster", link: str, one: int, other: int) -> ProbeTarget:
    to_address = address(other, cluster.link_index(link))
    return ProbeTarget(link, (one, other), to_address, cluster.way(one, other, link))


@dataclass(frozen=True)
class ProbeResult:
    """Measured values of a way; None if there was not enough time or nothing to measure.

    Attributes:
        asked: measured way.
        rate_bps: bits per second with all headers.
        latency_s: one-way delay in seconds.
    """

    asked: ProbeTarget
    rate_bps: float | None = None
    latency_s: float | None = None

    @property
    def has_values(self) -> bool:
        """Whether at least one value has been measured."""
        return self.rate_bps is not None or self.latency_s is not None

    def deviations(self) -> list[str]:
        """Return a description of every value that deviates by more than 10 %."""
        way, texts = self.asked.way, []
        if way.rate_bps is not None and self.rate_bps is not None:
            texts += _deviation("rate", self.rate_bps / way.rate_bps)
        if way.latency_s and self.latency_s is not None:
            texts += _deviation("latency", self.latency_s / way.latency_s)
        return texts

    @property
    def text(self) -> str:
        """Configured and measured values in one line."""
        one, other = self.asked.hosts
        record = self.record()
        where = f"{self.asked.link}, hosts {one} and {other}"
        return f"{where}: asked {record['asked']}, measured {record['measured']}"

    def record(self) -> dict[str, Any]:
        """Return plain data for the JSON record of a run."""
        way = self.asked.way
        delay = f", {format_time(way.latency_s)}" if way.latency_s else ""
        measured = []
        if way.rate_bps is not None:
            measured.append("-" if self.rate_bps is None else format_rounded_rate(self.rate_bps))
        late = "-" if self.latency_s is None else format_time(float(f"{self.latency_s:.3g}"))
        measured.append(f"{late} one way" if self.latency_s is not None else late)
        return {
            "link": self.asked.link,
            "hosts": list(self.asked.hosts),
            "asked": format_rate(way.rate_bps) + delay,
            "measured": ", ".join(measured),
            "asked_rate_bps": way.rate_bps,
            "rate_bps": self.rate_bps,
            "asked_latency_s": way.latency_s,
            "latency_s": self.latency_s,
            "asked_loss": way.loss,
        }


def probe_targets(cluster: "Cluster") -> list[ProbeTarget]:
    """Return the most informative ways.

    The first ways cover each configured rate and delay of each link, at most `MOST_DISTINCT` ways.
    Up to `MOST_WAYS` ways altogether, further ways reach hosts that are not part of an earlier way.
    """
    ways = [
        _target(cluster, link.name, one, other)
        for link in cluster.links
        for one, other in combinations(range(cluster.hosts), 2)
    ]
    distinct = {(asked.link, asked.way): asked for asked in reversed(ways)}
    chosen = [asked for asked in ways if distinct[asked.link, asked.way] is asked][:MOST_DISTINCT]
    reached = {(asked.link, host) for asked in chosen for host in asked.hosts}
    for asked in ways:
        ends = {(asked.link, host) for host in asked.hosts}
        if len(chosen) < MOST_WAYS and not ends & reached:
            chosen.append(asked)
            reached |= ends
    return chosen


def lines(results: Sequence[ProbeResult]) -> list[str]:
    """Return the lines to print before a run: all measured ways, then a warning for each
    deviation."""
    texts = [measured.text for measured in results if measured.has_values]
    for measured in results:
        one, other = measured.asked.hosts
        texts += [
            f"warning: {measured.asked.link} between hosts {one} and {other}: {words}"
            for words in measured.deviations()
        ]
    return texts


def _deviation(what: str, ratio: float) -> list[str]:
    if abs(ratio - 1) <= TOLERANCE:
        return []
    where = "above" if ratio > 1 else "below"
    return [f"the measured {what} is {100 * abs(ratio - 1):.0f} % {where} what is asked"]


# --- all hosts at once ---
#
# The hosts share the processors of one machine. Each link alone may reach its rate while all links
# together do not.


def ring_ways(cluster: "Cluster") -> list[ProbeTarget]:
    """Return the ways from every host to the next one on every link with a configured rate.

    A link with delay or loss is omitted, because TCP may not reach the rate on it.
    """
    ways: list[ProbeTarget] = []
    hosts = cluster.hosts if cluster.hosts > 1 else 0
    for link in cluster.links:
        ring = [_target(cluster, link.name, host, (host + 1) % hosts) for host in range(hosts)]
        if not any(asked.way.latency_s or asked.way.loss for asked in ring):
            ways += [asked for asked in ring if asked.way.rate_bps is not None]
    return ways


def needs_check(ways: Sequence[ProbeTarget]) -> bool:
    """Return whether the total configured rate is high enough to require a measurement."""
    return _sum_bps(ways) > UNCHECKED_BPS


@dataclass(frozen=True)
class Throughput:
    """Throughput of ways that were all in use at once.

    Attributes:
        ways: measured ways.
        rates_bps: measured bits per second of each way, with all headers.
    """

    ways: Sequence[ProbeTarget]
    rates_bps: Sequence[float]

    @property
    def share(self) -> float:
        """Measured share of the total configured rate."""
        return sum(self.rates_bps) / _sum_bps(self.ways)

    @property
    def text(self) -> str:
        """Configured and measured total rate in one line."""
        record = self.record()
        return f"all hosts at once: asked {record['asked']}, measured {record['measured']}"

    def check(self) -> None:
        """Raise LabError if the machine reaches less than 90 % of the total configured rate."""
        if self.share >= LEAST_SHARE:
            return
        fastest = max(asked.way.rate_bps or 0 for asked in self.ways)
        hosts, record = {host for asked in self.ways for host in asked.hosts}, self.record()
        raise LabError(
            f"a rate of {format_rate(fastest)} for {len(hosts)} hosts "
            f"({record['asked']} when all send at once) is more than this "
            f"machine's processors carry: {record['measured']} ({self.share:.0%}, at "
            f"least {LEAST_SHARE:.0%} is needed); ask for at most "
            f"{format_rounded_rate(fastest * self.share * LEAST_SHARE, 2)} or for fewer hosts, or "
            "stop what else runs on this machine"
        )

    def record(self) -> dict[str, Any]:
        """Return plain data for the JSON record of a run."""
        return {
            "link": ", ".join(dict.fromkeys(asked.link for asked in self.ways)),
            "hosts": "all at once",
            "asked": f"{format_rounded_rate(_sum_bps(self.ways), 2)} in all",
            "measured": f"{format_rounded_rate(sum(self.rates_bps), 2)} in all",
            "asked_rate_bps": _sum_bps(self.ways),
            "rate_bps": sum(self.rates_bps),
        }


def _sum_bps(ways: Sequence[ProbeTarget]) -> int:
    return sum(asked.way.rate_bps or 0 for asked in ways)
