"""Configured and measured values of a cluster's links, and the deviations between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.lab.addressing import address
from offbeat.lab.description import Cluster, Way
from offbeat.lab.units import format_rate, format_time

MOST_WAYS = 8
TOLERANCE = 0.1  # accepted deviation as a share of the configured value


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

    def message(self) -> dict[str, Any]:
        """Return the request for the supervisor. An unshaped way has no rate to measure."""
        return {
            "hosts": list(self.hosts),
            "address": self.to_address,
            "rate": self.way.rate_bps is not None,
            "latency_s": self.way.latency_s,
        }


@dataclass(frozen=True)
class ProbeResult:
    """Measured values of a way; None if there was not enough time or nothing to measure.

    Attributes:
        asked: measured way.
        rate_bps: bits per second with all headers.
        latency_s: one-way delay in seconds.
    """

    asked: ProbeTarget
    rate_bps: float | None
    latency_s: float | None

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
    def asked_text(self) -> str:
        """Configured values, such as "100mbit, 20ms"."""
        way = self.asked.way
        words = [format_rate(way.rate_bps)]
        words += [format_time(way.latency_s)] if way.latency_s else []
        return ", ".join(words)

    @property
    def measured_text(self) -> str:
        """Measured values, such as "98.7mbit, 20.3ms one way"; "-" for a value without
        measurement."""
        words = []
        if self.asked.way.rate_bps is not None:
            words.append("-" if self.rate_bps is None else _rate(self.rate_bps))
        words.append("-" if self.latency_s is None else f"{_time(self.latency_s)} one way")
        return ", ".join(words)

    @property
    def text(self) -> str:
        """Configured and measured values in one line."""
        one, other = self.asked.hosts
        where = f"{self.asked.link}, hosts {one} and {other}"
        return f"{where}: asked {self.asked_text}, measured {self.measured_text}"

    def record(self) -> dict[str, Any]:
        """Return plain data for the JSON record of a run."""
        way = self.asked.way
        return {
            "link": self.asked.link,
            "hosts": list(self.asked.hosts),
            "asked": self.asked_text,
            "measured": self.measured_text,
            "asked_rate_bps": way.rate_bps,
            "rate_bps": self.rate_bps,
            "asked_latency_s": way.latency_s,
            "latency_s": self.latency_s,
            "asked_loss": way.loss,
        }


def probe_targets(cluster: Cluster, most: int = MOST_WAYS) -> list[ProbeTarget]:
    """Return the most informative ways, at most `most`.

    The first ways cover each configured rate and delay. Further ways reach hosts that are not part
    of an earlier way.
    """
    chosen: list[ProbeTarget] = []
    for index, link in enumerate(cluster.links):
        seen: set[Way] = set()
        for one, other in _pairs(cluster.hosts):
            way = cluster.way(one, other, link.name)
            if way not in seen:
                seen.add(way)
                chosen.append(ProbeTarget(link.name, (one, other), address(other, index), way))
    reached = {(asked.link, host) for asked in chosen for host in asked.hosts}
    for index, link in enumerate(cluster.links):
        for one, other in _pairs(cluster.hosts):
            if (link.name, one) not in reached and (link.name, other) not in reached:
                way = cluster.way(one, other, link.name)
                chosen.append(ProbeTarget(link.name, (one, other), address(other, index), way))
                reached |= {(link.name, one), (link.name, other)}
    return chosen[:most]


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


def _pairs(hosts: int) -> Iterator[tuple[int, int]]:
    return ((one, other) for one in range(hosts) for other in range(one + 1, hosts))


def _deviation(what: str, ratio: float) -> list[str]:
    if abs(ratio - 1) <= TOLERANCE:
        return []
    where = "above" if ratio > 1 else "below"
    return [f"the measured {what} is {100 * abs(ratio - 1):.0f} % {where} what is asked"]


def _rate(rate_bps: float) -> str:
    return format_rate(round(float(f"{rate_bps:.3g}")))


def _time(time_s: float) -> str:
    return format_time(float(f"{time_s:.3g}"))
