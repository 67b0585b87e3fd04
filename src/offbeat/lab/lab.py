"""A lab to run ranks in: `Lab` (network namespaces, shaped links) or `NoLab` (loopback)."""

import os
import platform
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from offbeat.lab.addressing import address, interface_name
from offbeat.lab.description import Cluster
from offbeat.lab.errors import LabError
from offbeat.lab.probe_report import Measured, asked_ways
from offbeat.lab.process import LabProcess
from offbeat.lab.saturation import LEAST_SHARE, TRIES, Carried, much, ring_ways
from offbeat.lab.templates import change_messages, network_message
from offbeat.lab.units import parse_rate_bps

_FIRST_PORT = 29500
_PORTS = 10_000


@dataclass(frozen=True)
class Traffic:
    """Bytes that one host sent to and received from one link, headers included.

    What TCP hands over at once (on an unshaped link up to 64 KB) counts with one header only.
    """

    sent_bytes: int
    received_bytes: int


class Lab:
    """A cluster of network namespaces with shaped links, as long as the `with` block lasts.

    Nothing of it is visible outside: labs side by side cannot collide, and when this process ends,
    however it ends, the kernel removes namespaces and processes. Entering raises LabError, with
    words and alternatives, if the machine refuses namespaces, shaping or latency.
    """

    note: str | None = None

    def __init__(self, cluster: Cluster, name: str = "lab") -> None:
        self.cluster = cluster
        self.name = name
        self.congestion_control = cluster.congestion_control
        self.setup_s = 0.0
        self.switched: tuple[str, ...] = ()  # links with a switch of our own
        self._process: LabProcess | None = None
        self._inodes: list[int] = []
        self._launches = 0

    def __enter__(self) -> Self:
        start_s = time.perf_counter()
        _check_not_entered(self._process)
        process = LabProcess()
        try:
            built = process.request("build", plan=network_message(self.cluster, self.name))
        except BaseException:
            process.close()
            raise
        self._process = process
        self.congestion_control = built["congestion_control"]
        self._inodes = built["inodes"]
        self.switched = tuple(self.cluster.links[link].name for link in built["switched"])
        self.setup_s = time.perf_counter() - start_s
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes in the lab and remove it; may be repeated."""
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def process(self) -> LabProcess:
        """The process that holds the lab; LabError outside of the `with` block."""
        return _entered(self._process)

    def interface(self, link: int) -> str:
        """Name of the interface to a link, the same in every host."""
        _check_index("link", link, len(self.cluster.links))
        return interface_name(link)

    def address(self, host: int, link: int = 0) -> str:
        """IPv4 address of a host on a link, reachable from inside the lab only."""
        _check_index("host", host, self.cluster.hosts)
        _check_index("link", link, len(self.cluster.links))
        return address(host, link)

    def host_key(self, host: int) -> int | None:
        """Where the process has to start a rank of this host (None: outside of any namespace)."""
        return host

    def next_port(self) -> int:
        """A port that no earlier launch of this lab used."""
        self._launches += 1
        return _FIRST_PORT + self._launches % _PORTS

    def set_rate(self, host: int, link: str, rate: str | float | None) -> None:
        """Change a live rate, both directions; `rate` as in `Link`. ValueError, LabError."""
        _check_index("host", host, self.cluster.hosts)
        index, rate_bps = self.cluster.link_index(link), parse_rate_bps(rate)
        values = {"rate_bps": rate_bps}
        change = {"at_s": 0.0, "link": index, "values": values, "hosts": [host]}
        self.process.request("change", change=change)

    def changes(self) -> list[dict[str, Any]]:
        """What is to change during a launch, as the lab's own process is told."""
        return change_messages(self.cluster)

    def probe(self, budget_s: float = 2.0) -> list[Measured]:
        """Rates and delays between some hosts, measured in about so many seconds: one pair for each
        that is asked for, and every host as far as the time goes."""
        asked = asked_ways(self.cluster)
        ways = [way.message() for way in asked]
        found = self.process.request("probe", ways=ways, budget_s=budget_s)
        return [Measured(way, **values) for way, values in zip(asked, found, strict=True)]

    def verify(self, limit_s: float = 0.6) -> Carried | None:
        """What is carried while every host sends to the next one, best of three tries; None where
        so little is asked that it is not measured. LabError below 90 % of what is asked."""
        ways = ring_ways(self.cluster)
        if not much(ways):
            return None
        messages = [way.message() for way in ways]
        best: Carried | None = None
        for _ in range(TRIES):
            found = Carried(ways, self.process.request("flood", ways=messages, limit_s=limit_s))
            best = found if best is None else max(best, found, key=lambda each: each.share)
            if best.share >= LEAST_SHARE:
                break
        assert best is not None
        best.check()
        return best

    def counters(self) -> dict[int, dict[str, Traffic]]:
        """Bytes so far, by host and link name."""
        names = [link.name for link in self.cluster.links]
        rows = self.process.request("counters")
        return {
            host: {name: Traffic(*pair) for name, pair in zip(names, row, strict=True)}
            for host, row in enumerate(rows)
        }

    def inodes(self) -> list[int]:
        """Identities of the lab's namespaces, as in /proc/PID/ns/net."""
        return list(self._inodes)

    def record(self) -> dict[str, Any]:
        """What a run's JSON record says about its lab; times in seconds."""
        return _record(self, "namespaces")


class NoLab:
    """The same interface on the loopback, unshaped; `note` says so and belongs in every report."""

    note: str | None = (
        "no lab: all ranks share this machine's loopback, UNSHAPED; the cluster's rates and "
        "latencies are not in force, so times say nothing about a slow network"
    )

    def __init__(self, cluster: Cluster, name: str = "nolab") -> None:
        self.cluster = cluster
        self.name = name
        self.congestion_control = "default"
        self.setup_s = 0.0
        self.switched: tuple[str, ...] = ()
        self._process: LabProcess | None = None

    def __enter__(self) -> Self:
        start_s = time.perf_counter()
        _check_not_entered(self._process)
        self._process = LabProcess()
        self.setup_s = time.perf_counter() - start_s
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes that were started; may be repeated."""
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def process(self) -> LabProcess:
        """The process that starts ranks; LabError outside of the `with` block."""
        return _entered(self._process)

    def interface(self, link: int) -> str:
        """The loopback, for every link."""
        _check_index("link", link, len(self.cluster.links))
        return "lo"

    def address(self, host: int, link: int = 0) -> str:
        """The loopback's address, for every host and link."""
        _check_index("host", host, self.cluster.hosts)
        _check_index("link", link, len(self.cluster.links))
        return "127.0.0.1"

    def host_key(self, host: int) -> int | None:
        """None: no namespace."""
        _check_index("host", host, self.cluster.hosts)
        return None

    def next_port(self) -> int:
        """A port that is free on the loopback now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def set_rate(self, host: int, link: str, rate: str | float | None) -> None:
        """Always a LabError: the loopback is not shaped."""
        raise LabError(
            f"the rate of link {link!r} on host {host} cannot become {rate!r}: --lab none is "
            "unshaped; use a Lab"
        )

    def changes(self) -> list[dict[str, Any]]:
        """None: nothing is shaped."""
        return []

    def probe(self, budget_s: float = 2.0) -> list[Measured]:
        """None: nothing is asked of the loopback."""
        return []

    def verify(self) -> None:
        """Nothing is asked of the loopback."""

    def counters(self) -> dict[int, dict[str, Traffic]]:
        """Empty: on the loopback nobody can tell the hosts' bytes apart."""
        return {}

    def record(self) -> dict[str, Any]:
        """What a run's JSON record says about its lab; times in seconds."""
        return _record(self, "none")


def check_support(cluster: Cluster) -> None:
    """Build one host with the cluster's links and remove it again; LabError if that is refused."""
    alone = {"hosts": 1, "overrides": (), "pairs": (), "changes": ()}
    with Lab(cluster.model_copy(update=alone), "support check"):
        return


def _record(lab: Lab | NoLab, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": lab.name,
        "note": lab.note,
        "cluster": lab.cluster.record(),
        "congestion_control": lab.congestion_control,
        "setup_s": lab.setup_s,
        "switched": list(lab.switched),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "traffic": {
            str(host): {name: asdict(traffic) for name, traffic in links.items()}
            for host, links in lab.counters().items()
        },
    }


def _entered(process: LabProcess | None) -> LabProcess:
    if process is None:
        raise LabError("the lab is not running; use it as a context manager: with Lab(cluster):")
    return process


def _check_not_entered(process: LabProcess | None) -> None:
    if process is not None:
        raise LabError("the lab is running already; make a second Lab for a second one")


def _check_index(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{what} ({value}) must be from 0 to {count - 1}")
