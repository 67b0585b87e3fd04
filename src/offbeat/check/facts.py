"""Facts of one rank's host that a job depends on."""

from __future__ import annotations

import os
import platform
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.core.start.launch_request import LINKS_VARIABLE
from offbeat.core.transport.addresses import GLOO_INTERFACE, is_local, require_interfaces
from offbeat.core.transport.interfaces import LinkSpec, address_towards, ipv4_of

_SIOCGIFMTU = 0x8921  # linux/sockios.h
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoint:
    """Address of one rank on one link.

    Attributes:
        interface: name of the network interface.
        address: its IPv4 address.
        mtu: its largest packet in bytes.
        gloo_address: address on which gloo listens.
        port: port on which this rank listens during the check.
        connections: number of TCP connections to every other rank.
    """

    interface: str
    address: str
    mtu: int
    gloo_address: str
    port: int = 0
    connections: int = 1


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank.

    Attributes:
        host: name of the host.
        host_key: equal on ranks that share a host and its network.
        versions: versions of offbeat, torch and Python.
        open_files: largest number of open files.
        congestion_control: TCP congestion control of new connections.
        endpoints: one per link.
        problem: reason why this rank has no endpoints, or None.
    """

    host: str
    host_key: str
    versions: dict[str, str]
    open_files: int
    congestion_control: str
    endpoints: list[Endpoint] = field(default_factory=list)
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankFacts:
        """Return the facts of plain data."""
        endpoints = [Endpoint(**endpoint) for endpoint in data["endpoints"]]
        return cls(**{**data, "endpoints": endpoints})


def local_facts() -> RankFacts:
    """Return the facts of this rank, without endpoints."""
    with socket.socket() as probe:
        control = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return RankFacts(
        host=socket.gethostname(),
        host_key=f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino}",
        versions={
            "offbeat": offbeat.__version__,
            "torch": torch.__version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        congestion_control=control.rstrip(b"\0").decode(),
    )


def find_endpoint(spec: LinkSpec) -> Endpoint:
    """Return this rank's endpoint of a link.

    Without an interface in the link or in `GLOO_SOCKET_IFNAME`, it is the address of the host's
    name, as for gloo. If that is a loopback address, it is the address towards `MASTER_ADDR`.

    Raises:
        ValueError: the interface does not exist or has no IPv4 address.
    """
    option, name, connections = LINKS_VARIABLE, spec.interface, spec.connections
    if name is None:
        option, names = GLOO_INTERFACE, os.environ.get(GLOO_INTERFACE, "").split(",")
        name, connections = names[0], len(names)  # gloo opens one connection per entry
    if not name:
        named = _address_of_host_name()
        address = address_towards(os.environ["MASTER_ADDR"]) if is_loopback(named) else named
        name = _interface_of(address)
        return Endpoint(name, address, _mtu_of(name), named)
    require_interfaces(option, [name])
    own = ipv4_of(name)
    if own is None:
        raise ValueError(f"{option} ({name}) must name an interface with an IPv4 address")
    address = str(own.ip)
    return Endpoint(name, address, _mtu_of(name), address, connections=connections)


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address reaches only its own host."""
    return address.startswith("127.")


def _address_of_host_name() -> str:
    """Return the address of the host's name, or the loopback where gloo cannot use it."""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if is_local((socket.AF_INET, address)):
            return address
    return LOOPBACK


def _interface_of(address: str) -> str:
    for _, name in socket.if_nameindex():
        own = ipv4_of(name)
        if own is not None and str(own.ip) == address:
            return name
    return "lo"  # 127.0.1.1 has no interface of its own


def _mtu_of(interface: str) -> int:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return struct.unpack_from("i", fcntl.ioctl(s.fileno(), _SIOCGIFMTU, request), 16)[0]
