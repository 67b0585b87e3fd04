"""Network interfaces of links: parsing, addresses, and checks that they connect all ranks."""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from offbeat.core.plan import CHANNEL, INSIDE
from offbeat.core.transport.addresses import GLOO_INTERFACE
from offbeat.core.transport.listeners import open_listener
from offbeat.core.transport.topology import Topology

if TYPE_CHECKING:
    from offbeat.core.transport.agreement import Agreement

BACKENDS = ("gloo", "nccl")
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NCCL_ERRORS, NCCL_DUMPS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
MESH_RANKS = 64  # largest number of ranks whose groups of gloo connect all pairs at their start
CHECK_S = 15.0
MOST_CHECKED = 64  # largest number of ranks to all of which a rank connects before the start
SHOWN = 4  # failed connections in an error
UNKNOWN = 1 << 30  # index of a link that rank 0 does not have, after all others
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


@dataclass(frozen=True)
class LinkSpec:
    """Description of a link.

    Attributes:
        name: name of the link.
        interface: name of its network interface; None lets torch choose.
        backend: "gloo" or "nccl"; None selects gloo.
        connections: number of TCP connections between two ranks. Large messages are split between
            them. More than one requires gloo and an interface.
    """

    name: str
    interface: str | None = None
    backend: str | None = None
    connections: int = 1

    def __str__(self) -> str:
        on = f" ({self.interface})" if self.interface not in (None, self.name) else ""
        several = f" with {self.connections} connections" if self.connections > 1 else ""
        return f"link {self.name!r}{on}{several}"


def parse_link(text: str) -> LinkSpec:
    """Return the link of a text "interface", "backend:interface", "backend:" or "backend".

    "NAME=" before it sets the name of the link. "*N" after an interface sets the number of
    connections. The default name of the link does not contain it, so that a plan is valid for any
    number.
    """
    own_name, named, rest = text.partition("=")
    if named:
        if not own_name or set(own_name) & {CHANNEL, ":", "*"} or "=" in rest:
            raise ValueError(
                f"link ({text!r}) must read NAME=INTERFACE or NAME=BACKEND:INTERFACE, with none of "
                f"'{CHANNEL}:*=' in the name, as in wan=eth0"
            )
        return replace(parse_link(rest), name=own_name)
    name, star, count = text.partition("*")
    if not name or CHANNEL in name:
        raise ValueError(
            f"link ({text!r}) must read INTERFACE or BACKEND:INTERFACE, without {CHANNEL!r}, "
            "as in eth0 or gloo:eth1"
        )
    backend, _, interface = name.partition(":")
    if backend in BACKENDS:
        spec = LinkSpec(name.rstrip(":"), interface or None, backend)
    else:
        spec = LinkSpec(name, name)
    if not star:
        return spec
    if not (count.isdecimal() and int(count) and spec.interface):
        raise ValueError(
            f"link ({text!r}) must read INTERFACE*N with at least 1 connection, as in eth0*2"
        )
    return replace(spec, connections=int(count))


@contextmanager
def group_environment(spec: LinkSpec, ranks: int = 1):
    """Set the environment for process groups that send their first message in the block.

    gloo reads the name of the interface when a group is created, NCCL with the first message of the
    process. gloo opens one connection between two ranks for each name in the variable.

    gloo connects all pairs of ranks when a group is created. Each rank then opens a file for each
    other rank, and reads the addresses of all pairs from the store. Above `MESH_RANKS` ranks, a
    pair connects with its first message instead, unless the user has set the variable.

    After the failure of a rank, NCCL's watchdog would end the processes of the other ranks before
    they report the failure. After its dump of the last messages, torch waits up to 8 minutes when
    the script destroys the groups. Unless the user has set their variables, both are turned off.
    """
    wanted = {}
    if ranks > MESH_RANKS:
        wanted[LAZY_CONNECTIONS] = os.environ.get(LAZY_CONNECTIONS, "1")
    if spec.interface is not None:
        names = ",".join([spec.interface] * spec.connections)
        wanted |= {GLOO_INTERFACE: names, NCCL_INTERFACE: f"={spec.interface}"}
    if spec.backend == "nccl":
        wanted |= {name: os.environ.get(name, "0") for name in (NCCL_ERRORS, NCCL_DUMPS)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def connects_lazily() -> bool:
    """Return whether new groups of gloo connect two ranks with their first message."""
    return os.environ.get(LAZY_CONNECTIONS, "0").lower() not in ("", "0", "n", "no", "f", "false")


def control_interface(specs: Sequence[LinkSpec], topology: Topology) -> str | None:
    """Return the interface for process groups that belong to no link; None lets gloo choose.

    It is the interface of the first link, unless `GLOO_SOCKET_IFNAME` is set, or the link does not
    connect all ranks because replicas have several ranks.
    """
    return None if os.environ.get(GLOO_INTERFACE) or not topology.is_flat else specs[0].interface


def ipv4_of(interface: str) -> ipaddress.IPv4Interface | None:
    """Return an interface's first IPv4 address and network.

    Return None if there is none, or if the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, suppress(OSError):
        own, mask = (
            socket.inet_ntoa(fcntl.ioctl(s.fileno(), what, request)[20:24])
            for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        return ipaddress.IPv4Interface(f"{own}/{mask}")
    return None


def own_address(interface: str | None, host: str) -> str:
    """Return this host's address on an interface, or else the address towards `host`."""
    own = ipv4_of(interface) if interface else None
    return address_towards(host) if own is None else str(own.ip)


def address_towards(host: str) -> str:
    """Return this host's address in the network through which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # a UDP connect sends nothing, it selects the interface
        return s.getsockname()[0]


# ---- the same links on all ranks ------------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    """Links of one rank, their networks, and all interfaces of its host."""

    links: tuple[LinkSpec, ...]
    networks: tuple[str | None, ...]
    interfaces: tuple[str, ...]


def require_one_order(specs: Sequence[LinkSpec], *, shards: bool = False) -> None:
    """Raise ValueError if several groups of NCCL would be in use at the same time.

    NCCL requires one order of launches over all groups of a process, and each link has a thread of
    its own. Otherwise kernels of two groups can wait for each other on the device.

    Args:
        specs: the links between replicas and inside them.
        shards: whether NCCL gathers the shards of the model.
    """
    over_nccl = [spec for spec in specs if spec.backend == "nccl"]
    if len(over_nccl) + shards > 1:
        other = "the shards of the model" if shards else str(over_nccl[1])
        where = over_nccl[0].interface
        raise ValueError(
            f"{over_nccl[0]} and {other} must not both use NCCL, which requires one order of "
            f"launches over all its groups; give {'gloo' if where is None else f'gloo:{where}'} "
            "instead"
        )


def agree_on_links(
    specs: Sequence[LinkSpec], control: Agreement, topology: Topology
) -> list[LinkSpec]:
    """Return the links with the names of rank 0, after checks that all ranks have the same links.

    Every rank must call it.

    Raises:
        ValueError: on every rank, if an interface does not exist on a host, if hosts list links in
            different orders, or if ranks that use a link cannot reach each other.
    """
    kinds = [spec.backend for spec in specs]
    control.agree("the backends of the links", kinds, "give every rank the same links")
    counts = [spec.connections for spec in specs]
    control.agree("the connections of the links", counts, "give every rank the same links")
    addresses = [ipv4_of(spec.interface) if spec.interface else None for spec in specs]
    networks = tuple(str(address.network) if address else None for address in addresses)
    present = tuple(name for _, name in socket.if_nameindex())
    own = (tuple(astuple(spec) for spec in specs), networks, present)
    hosts = [
        _Host(tuple(LinkSpec(*spec) for spec in links), *rest)
        for links, *rest in control.gather(own)
    ]
    problem = _missing_interface(hosts, control) or _order_mismatch(hosts, control)
    if problem:
        raise ValueError(problem)
    agreed = [
        replace(spec, name=first.name) for spec, first in zip(specs, hosts[0].links, strict=True)
    ]
    for spec, address in zip(agreed, addresses, strict=True):
        peers = _peers(spec, control.rank, topology)
        _require_reach(spec, str(address.ip) if address else None, peers, control)
    return agreed


def _peers(spec: LinkSpec, rank: int, topology: Topology) -> Sequence[int]:
    """Return the ranks to which a rank connects on a link before the start.

    Above `MOST_CHECKED` ranks, they are those to which collectives send: the ranks at a distance of
    powers of two, in both directions.
    """
    everyone: Sequence[int] = range(topology.ranks)
    if not topology.is_flat:
        everyone = topology.node_of(rank) if spec.name == INSIDE else topology.column_of(rank) or ()
    if len(everyone) <= MOST_CHECKED:
        return everyone
    place, count = everyone.index(rank), len(everyone)
    distances = [1 << k for k in range((count - 1).bit_length())]
    return sorted({everyone[(place + d) % count] for far in distances for d in (far, -far)})


def _rank_at(rank: int, control: Agreement) -> str:
    return f"rank {rank} (host {control.hosts[rank]})"


def _missing_interface(hosts: Sequence[_Host], control: Agreement) -> str | None:
    for rank, host in enumerate(hosts):
        for spec in host.links:
            if spec.interface is not None and spec.interface not in host.interfaces:
                return (
                    f"link {spec.name!r}: interface {spec.interface!r} must exist on every host; "
                    f"{_rank_at(rank, control)} has {', '.join(host.interfaces)}"
                )
    return None


def _order_mismatch(hosts: Sequence[_Host], control: Agreement) -> str | None:
    """Return a description of the first rank with another order of links than rank 0, or None."""
    first = hosts[0]
    for rank, host in enumerate(hosts):
        places = [_index_in(first, host, i) for i in range(len(host.links))]
        for i, j in enumerate(places):
            if j in (i, UNKNOWN):
                continue
            names = [host.links[k].name for k in sorted(range(len(places)), key=places.__getitem__)]
            return (
                "links must be in the same order on all ranks: "
                f"{_rank_at(rank, control)} has {_link_text(host, i)} where "
                f"{_rank_at(0, control)} has {_link_text(first, i)}, but that is rank 0's "
                f"{_link_text(first, j)}; on rank {rank} give links={names}"
            )
    return None


def _index_in(first: _Host, host: _Host, i: int) -> int:
    """Return the index of rank 0's link in the same network as link `i` of a host, or else of the
    same name; `UNKNOWN` if there is none."""
    network, names = host.networks[i], [link.name for link in first.links]
    if network is not None and network in first.networks:
        return i if network == first.networks[i] else first.networks.index(network)
    return names.index(host.links[i].name) if host.links[i].name in names else UNKNOWN


def _link_text(host: _Host, i: int) -> str:
    network = host.networks[i]
    return f"link {i} {host.links[i].name!r}" + (f" in {network}" if network else "")


# ---- reach ----------------------------------------------------------------------------------


def _require_reach(
    spec: LinkSpec, own: str | None, peers: Sequence[int], control: Agreement
) -> None:
    """Require that each rank can connect to the ranks `peers` over the link's interface.

    A process group that cannot be created would raise after the whole timeout only.

    Raises:
        ValueError: on every rank, if a connection fails; names the ranks.
    """
    if control.world_size == 1:
        return
    # Half of the timeout: a rank whose connections succeed waits in `gather` for all other ranks.
    limit_s = min(control.timeout_s / 2, CHECK_S)
    with ExitStack() as stack:
        address: tuple[str, int] | None = None
        if own is not None:
            listening = open_listener(own, control.world_size)
            address = (own, stack.enter_context(listening).getsockname()[1])
        everyone: list[tuple[str, int] | None] = control.gather(address)
        others = {
            rank: address
            for rank, address in enumerate(everyone)
            if rank != control.rank and rank in peers and address is not None
        }
        missed = [] if own is None else [*unreachable(own, others, limit_s)]
        failures = control.gather(missed)  # every rank listens until all ranks have tried
    pairs = [(a, b) for a, missed in enumerate(failures) for b in missed]
    if pairs:
        words = "; ".join(
            f"{_rank_at(a, control)} cannot reach {_rank_at(b, control)} at {everyone[b][0]}"  # type: ignore[index]
            for a, b in pairs[:SHOWN]
        )
        more = f"; and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        raise ValueError(
            f"{spec} must connect all ranks, but within {limit_s:g} s {words}{more}; open the "
            "firewall between them, or give other interfaces as links"
        )


def unreachable(own: str, others: dict[int, tuple[str, int]], limit_s: float) -> dict[int, str]:
    """Return the ranks to which a connection from `own` fails within `limit_s`, with the reasons.

    `others` is (address, port) by rank.
    """
    end = time.monotonic() + limit_s
    missed: dict[int, str] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, address in others.items():
            s = stack.enter_context(socket.socket())
            s.setblocking(False)
            s.bind((own, 0))
            code = s.connect_ex(address)
            if code == errno.EINPROGRESS:
                selector.register(s, selectors.EVENT_WRITE, rank)
            elif code:
                missed[rank] = os.strerror(code)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # type: ignore[union-attr]
                    missed[key.data] = os.strerror(code)
        missed |= {key.data: f"no answer in {limit_s:g} s" for key in selector.get_map().values()}
    return dict(sorted(missed.items()))
