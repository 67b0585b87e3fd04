"""Check of the total throughput of a lab while all hosts send at once.

The hosts' links share the processors of one machine. Each link alone may reach its rate while all
links together do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.lab.addressing import address
from offbeat.lab.description import Cluster
from offbeat.lab.errors import LabError
from offbeat.lab.probe_report import ProbeTarget
from offbeat.lab.units import format_rate

LEAST_SHARE = 0.9  # required share of the configured total rate
# total rate in bit/s up to which no check is needed: two cores can forward it
UNCHECKED_BPS = 800_000_000
TRIES = 3  # other load of the machine varies, so use the best of several tries


def ring_ways(cluster: Cluster) -> list[ProbeTarget]:
    """Return the ways from every host to the next one on every link with a configured rate.

    A link with delay or loss is omitted, because TCP may not reach the rate on it.
    """
    ways: list[ProbeTarget] = []
    for index, link in enumerate(cluster.links):
        ring = [
            ProbeTarget(
                link.name, (one, other), address(other, index), cluster.way(one, other, link.name)
            )
            for one, other in _ring(cluster.hosts)
        ]
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
        return f"all hosts at once: asked {self._configured_text}, measured {self._measured_text}"

    def check(self) -> None:
        """Raise LabError if the machine reaches less than 90 % of the total configured rate."""
        if self.share >= LEAST_SHARE:
            return
        fastest = max(asked.way.rate_bps or 0 for asked in self.ways)
        raise LabError(
            f"a rate of {format_rate(fastest)} for {self._host_count} hosts "
            f"({self._configured_text} when all send at once) is more than this "
            f"machine's processors carry: {self._measured_text} ({self.share:.0%}, at "
            f"least {LEAST_SHARE:.0%} is needed); ask for at most "
            f"{_format_rounded(fastest * self.share * LEAST_SHARE)} or for fewer hosts, or stop "
            "what else runs on this machine"
        )

    def record(self) -> dict[str, Any]:
        """Return plain data for the JSON record of a run."""
        return {
            "link": ", ".join(dict.fromkeys(asked.link for asked in self.ways)),
            "hosts": "all at once",
            "asked": self._configured_text,
            "measured": self._measured_text,
            "asked_rate_bps": _sum_bps(self.ways),
            "rate_bps": sum(self.rates_bps),
        }

    @property
    def _host_count(self) -> int:
        return len({host for asked in self.ways for host in asked.hosts})

    @property
    def _configured_text(self) -> str:
        return f"{_format_rounded(_sum_bps(self.ways))} in all"

    @property
    def _measured_text(self) -> str:
        return f"{_format_rounded(sum(self.rates_bps))} in all"


def _ring(hosts: int) -> list[tuple[int, int]]:
    return [(host, (host + 1) % hosts) for host in range(hosts)] if hosts > 1 else []


def _sum_bps(ways: Sequence[ProbeTarget]) -> int:
    return sum(asked.way.rate_bps or 0 for asked in ways)


def _format_rounded(rate_bps: float) -> str:
    return format_rate(round(float(f"{rate_bps:.2g}")))
