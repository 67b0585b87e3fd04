"""What a lab carries while all hosts send at once, against what is asked of it.

The hosts' links share the processors of one machine: each alone may reach its rate, and all
together not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.lab.addressing import address
from offbeat.lab.description import Cluster
from offbeat.lab.errors import LabError
from offbeat.lab.probe_report import Asked
from offbeat.lab.units import format_rate

LEAST_SHARE = 0.9  # of what is asked
UNCHECKED_BPS = 800_000_000  # of all hosts together: two cores carry it
TRIES = 3  # what else runs on the machine comes and goes


def ring_ways(cluster: Cluster) -> list[Asked]:
    """From every host to the next one on every link, where a rate is asked for and nothing delays
    or loses packets: TCP alone need not reach the rate there."""
    ways: list[Asked] = []
    for index, link in enumerate(cluster.links):
        ring = [
            Asked(
                link.name, (one, other), address(other, index), cluster.way(one, other, link.name)
            )
            for one, other in _ring(cluster.hosts)
        ]
        if not any(asked.way.latency_s or asked.way.loss for asked in ring):
            ways += [asked for asked in ring if asked.way.rate_bps is not None]
    return ways


def much(ways: Sequence[Asked]) -> bool:
    """Whether so much is asked that it has to be measured."""
    return _sum_bps(ways) > UNCHECKED_BPS


@dataclass(frozen=True)
class Carried:
    """What was measured on `ways`, all at once: bits per second with all headers, of each."""

    ways: Sequence[Asked]
    rates_bps: Sequence[float]

    @property
    def share(self) -> float:
        """Of what is asked of all ways together."""
        return sum(self.rates_bps) / _sum_bps(self.ways)

    @property
    def text(self) -> str:
        """One line: asked and measured."""
        return f"all hosts at once: asked {self._asked}, measured {self._measured}"

    def check(self) -> None:
        """LabError where the machine carries less than 90 % of what is asked."""
        if self.share >= LEAST_SHARE:
            return
        fastest = max(asked.way.rate_bps or 0 for asked in self.ways)
        raise LabError(
            f"a rate of {format_rate(fastest)} for {self._hosts} hosts ({self._asked} when all "
            f"send at once) is more than this machine's processors carry: {self._measured} "
            f"({self.share:.0%}, at least {LEAST_SHARE:.0%} is needed); ask for at most "
            f"{_rounded(fastest * self.share * LEAST_SHARE)} or for fewer hosts, or stop what else "
            "runs on this machine"
        )

    def record(self) -> dict[str, Any]:
        """Plain data for a run's JSON record."""
        return {
            "link": ", ".join(dict.fromkeys(asked.link for asked in self.ways)),
            "hosts": "all at once",
            "asked": self._asked,
            "measured": self._measured,
            "asked_rate_bps": _sum_bps(self.ways),
            "rate_bps": sum(self.rates_bps),
        }

    @property
    def _hosts(self) -> int:
        return len({host for asked in self.ways for host in asked.hosts})

    @property
    def _asked(self) -> str:
        return f"{_rounded(_sum_bps(self.ways))} in all"

    @property
    def _measured(self) -> str:
        return f"{_rounded(sum(self.rates_bps))} in all"


def _ring(hosts: int) -> list[tuple[int, int]]:
    return [(host, (host + 1) % hosts) for host in range(hosts)] if hosts > 1 else []


def _sum_bps(ways: Sequence[Asked]) -> int:
    return sum(asked.way.rate_bps or 0 for asked in ways)


def _rounded(rate_bps: float) -> str:
    return format_rate(round(float(f"{rate_bps:.2g}")))
