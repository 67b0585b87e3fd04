"""Labs that run ranks: `Lab` (network namespaces, shaped links) and `NoLab` (loopback)."""

import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from offbeat.core.units import parse_rate_bps
from offbeat.lab.addressing import address, interface_name
from offbeat.lab.description import Cluster
from offbeat.lab.errors import LabError
from offbeat.lab.probe_report import (
    LEAST_SHARE,
    MOST_WAYS,
    TRIES,
    ProbeResult,
    Throughput,
    needs_check,
    probe_targets,
    ring_ways,
)
from offbeat.lab.process import LabProcess, require_linux
from offbeat.lab.switch.link_state import ChangePlan
from offbeat.lab.templates import change_plans, network_plan

_FIRST_PORT = 29500
_PORTS = 10_000
_LISTENING_PORTS = range(20_000, 32_768)  # Linux gives larger ports to outgoing connections


@dataclass(frozen=True)
class Traffic:
    """Bytes that one host has sent to and received from one link, headers included.

    A TCP segment (on an unshaped link up to 64 KB) counts with one header only.

    Attributes:
        sent_bytes: bytes sent by the host.
        received_bytes: bytes received by the host.
    """

    sent_bytes: int
    received_bytes: int


class _AnyLab:
    """What labs with and without a network have in common; a context manager."""

    note: str | None = None
    _kind: ClassVar[str]

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.congestion_control: str = "default"
        self.setup_s: float = 0.0
        self.switched: tuple[str, ...] = ()
        self._is_running = False
        self._launching = threading.Lock()

    def __enter__(self) -> Self:
        start_s = time.perf_counter()
        if self._is_running:
            raise LabError("the lab is running already; make a second Lab for a second one")
        self._open()
        self._is_running = True
        self.setup_s = time.perf_counter() - start_s
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        require_linux()

    def close(self) -> None:
        """Remove the lab. Further calls have no effect."""
        self._is_running = False

    def require_running(self) -> None:
        """Raise LabError outside of the `with` block, or if the lab has ended."""
        if not self._is_running:
            raise LabError(
                "the lab is not running; use it as a context manager: with Lab(cluster):"
            )

    @contextmanager
    def exclusive_launch(self) -> Iterator[None]:
        """Exclude other launches during the block, because their changes would affect each other.

        Raises:
            LabError: another launch is running, or the lab is not.
        """
        self.require_running()
        if not self._launching.acquire(blocking=False):
            raise LabError("this lab is running a launch already; wait, or make a second Lab")
        try:
            yield
        finally:
            self._launching.release()

    def counters(self) -> dict[int, dict[str, Traffic]]:
        """Return the traffic so far, by host and link name; empty on the loopback."""
        return {}

    def record(self) -> dict[str, Any]:
        """Return plain data on the lab for the JSON record of a run; times in seconds."""
        return {
            "kind": self._kind,
            "name": self.name,
            "note": self.note,
            "cluster": self.cluster.record(),
            "congestion_control": self.congestion_control,
            "setup_s": self.setup_s,
            "switched": list(self.switched),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "traffic": {
                str(host): {name: asdict(traffic) for name, traffic in links.items()}
                for host, links in self.counters().items()
            },
        }


class Lab(_AnyLab):
    """Cluster of network namespaces with shaped links that exists during the `with` block.

    It is not visible outside, so labs side by side do not collide. When this process ends for any
    reason, the kernel removes namespaces and processes.

    Args:
        cluster: description of hosts and links.
        name: name of the lab in records.

    Attributes:
        note: warning for reports; None for a lab.
        congestion_control: TCP congestion control in use.
        setup_s: seconds to build the lab.
        switched: names of the links that use the switch in user space.

    Raises:
        LabError: on entering, the machine refuses namespaces, shaping or latency.
    """

    congestion_control: str
    switched: tuple[str, ...]
    _kind = "namespaces"

    def __init__(self, cluster: Cluster, name: str = "lab") -> None:
        super().__init__(cluster, name)
        self.congestion_control = cluster.congestion_control
        self._process: LabProcess | None = None
        self._built: dict[str, Any] = {}
        self._launches = 0

    def _open(self) -> None:
        process = LabProcess()
        try:
            built = process.request("build", plan=network_plan(self.cluster))
        except BaseException:
            process.close()
            raise
        self._process, self._built = process, built
        self.congestion_control = built["congestion_control"]
        self.switched = tuple(self.cluster.links[link].name for link in built["switched"])

    def close(self) -> None:
        """End the network, and with it the lab. Further calls have no effect."""
        super().close()
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def process(self) -> LabProcess:
        """Process that holds the network; raises LabError outside of the `with` block."""
        super().require_running()
        assert self._process is not None
        return self._process

    def require_running(self) -> None:
        """Raise LabError outside of the `with` block, or if the lab's process has ended."""
        self.process.require_running()

    def interface(self, link: int) -> str:
        """Return the name of the interface to a link, which is the same in every host.

        Args:
            link: index of the link in `Cluster.links`.
        """
        _check_index("link", link, len(self.cluster.links))
        return interface_name(link)

    def address(self, host: int, link: int = 0) -> str:
        """Return the IPv4 address of a host on a link, reachable only from inside the lab.

        Args:
            host: number of the host.
            link: index of the link in `Cluster.links`.
        """
        _check_index("host", host, self.cluster.hosts)
        _check_index("link", link, len(self.cluster.links))
        return address(host, link)

    def namespace(self, host: int) -> tuple[int, int] | None:
        """Return the namespace of a host: a process id and a descriptor of this process.

        Args:
            host: number of the host.
        """
        return self.process.pid, self._built["fds"][host]

    def next_port(self) -> int:
        """Return a port that no earlier launch of this lab has used."""
        self._launches += 1
        return _FIRST_PORT + self._launches % _PORTS

    def set_rate(self, host: int, link: str, rate: str | float | None) -> None:
        """Change the rate of a host on a link while ranks run, in both directions.

        Args:
            host: number of the host.
            link: name of the link.
            rate: new rate as in `Link`.

        Raises:
            ValueError: host, link or rate is invalid.
            LabError: the kernel refuses the rate, or the lab is not running.
        """
        _check_index("host", host, self.cluster.hosts)
        index, rate_bps = self.cluster.link_index(link), parse_rate_bps(rate)
        self.apply(ChangePlan(0.0, index, {"rate_bps": rate_bps}, [host]))

    def changes(self) -> list[ChangePlan]:
        """Return the changes of a launch, earliest first."""
        return sorted(change_plans(self.cluster), key=lambda change: change.at_s)

    def apply(self, change: ChangePlan) -> None:
        """Apply new values on one link now.

        Args:
            change: the values. Its time has no effect.
        """
        self.process.request("change", change=change)

    def restore(self) -> None:
        """Give all links their initial values."""
        self.process.request("restore")

    def probe(self, budget_s: float = 2.0) -> list[ProbeResult]:
        """Return measured rates and delays between some hosts.

        One pair is measured for each configured rate and delay, and then every host as far as time
        permits.

        Args:
            budget_s: approximate limit of the time for eight measured pairs, in seconds. More pairs
                extend the limit in proportion.
        """
        asked = probe_targets(self.cluster)
        budget_s *= max(1.0, len(asked) / MOST_WAYS)
        return self.process.request("probe", ways=asked, budget_s=budget_s)

    def verify(self, limit_s: float = 0.6) -> Throughput | None:
        """Return the throughput while every host sends to the next one, the best of three tries.

        Args:
            limit_s: seconds of each try.

        Returns:
            Throughput, or None if the configured rates are too low to require a measurement.

        Raises:
            LabError: the throughput is below 90 % of the configured rates.
        """
        ways = ring_ways(self.cluster)
        if not needs_check(ways):
            return None
        tries = list[Throughput]()
        while len(tries) < TRIES and not any(each.share >= LEAST_SHARE for each in tries):
            rates_bps = self.process.request("flood", ways=ways, limit_s=limit_s)
            tries.append(Throughput(ways, rates_bps))
        best = max(tries, key=lambda each: each.share)
        best.check()
        return best

    def counters(self) -> dict[int, dict[str, Traffic]]:
        """Return the traffic so far, by host and link name."""
        names = [link.name for link in self.cluster.links]
        rows = self.process.request("counters")
        return {
            host: {name: Traffic(*pair) for name, pair in zip(names, row, strict=True)}
            for host, row in enumerate(rows)
        }

    def inside_counters(self) -> dict[int, Traffic]:
        """Return the traffic inside each host so far, between its ranks."""
        return dict(enumerate(Traffic(*pair) for pair in self.process.request("inside_counters")))

    def inodes(self) -> list[int]:
        """Return the identities of the lab's namespaces, as in /proc/PID/ns/net."""
        return list(self._built["inodes"])


class NoLab(_AnyLab):
    """Replacement for `Lab` on the unshaped loopback. Every report contains its `note`.

    Args:
        cluster: description of hosts and links; rates and latencies have no effect.
        name: name in records.

    Attributes:
        note: warning for reports that links are not shaped.
        congestion_control: always "default".
        setup_s: seconds to start.
        switched: always empty.
    """

    note: str | None = (
        "no lab: all ranks share this machine's loopback, UNSHAPED; the cluster's rates and "
        "latencies are not in force, so times say nothing about a slow network"
    )

    _kind = "none"

    def __init__(self, cluster: Cluster, name: str = "nolab") -> None:
        super().__init__(cluster, name)

    def interface(self, link: int) -> str:
        """Return the loopback for every link.

        Args:
            link: index of the link in `Cluster.links`.
        """
        _check_index("link", link, len(self.cluster.links))
        return "lo"

    def address(self, host: int, link: int = 0) -> str:
        """Return the address of the loopback for every host and link.

        Args:
            host: number of the host.
            link: index of the link in `Cluster.links`.
        """
        _check_index("host", host, self.cluster.hosts)
        _check_index("link", link, len(self.cluster.links))
        return "127.0.0.1"

    def namespace(self, host: int) -> None:
        """Return None: there is no namespace.

        Args:
            host: number of the host.
        """

    def next_port(self) -> int:
        """Return a free port of the loopback that no outgoing connection takes meanwhile.

        Raises:
            LabError: no port is free.
        """
        for port in secrets.SystemRandom().sample(_LISTENING_PORTS, len(_LISTENING_PORTS)):
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
        first, last = _LISTENING_PORTS[0], _LISTENING_PORTS[-1]
        raise LabError(f"a port of 127.0.0.1 from {first} to {last} must be free; end other jobs")

    def set_rate(self, host: int, link: str, rate: str | float | None) -> None:
        """Raise LabError: the loopback is not shaped.

        Args:
            host: number of the host.
            link: name of the link.
            rate: requested rate.

        Raises:
            LabError: in every case.
        """
        raise LabError(
            f"the rate of link {link!r} on host {host} cannot become {rate!r}: --lab none is "
            "unshaped; use a Lab"
        )

    def changes(self) -> list[ChangePlan]:
        """Return an empty list: there is no shaping to change."""
        return []

    def apply(self, change: ChangePlan) -> None:
        """Do nothing: there is no shaping to change.

        Args:
            change: has no effect.
        """

    def restore(self) -> None:
        """Do nothing: there is no shaping to restore."""

    def probe(self, budget_s: float = 2.0) -> list[ProbeResult]:
        """Return an empty list: the loopback has no configured rates.

        Args:
            budget_s: has no effect.
        """
        return []

    def verify(self, limit_s: float = 0.6) -> None:
        """Return None: the loopback has no configured rates.

        Args:
            limit_s: has no effect.
        """


def check_support(cluster: Cluster) -> None:
    """Build and remove one host with the links of a cluster.

    Args:
        cluster: description of the links.

    Raises:
        LabError: the machine refuses the lab.
    """
    alone = {"hosts": 1, "overrides": (), "pairs": (), "changes": ()}
    with Lab(cluster.model_copy(update=alone), "support check"):
        return


def _check_index(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{what} ({value}) must be from 0 to {count - 1}")
