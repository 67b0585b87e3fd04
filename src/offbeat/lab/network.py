"""The lab's network: anonymous namespaces, bridges, veth pairs and shapers, over netlink.

Runs inside the lab's own process (see `supervisor`). No namespace has a name: each lives as long as
a descriptor or a process in it, so the kernel removes everything when the lab's process ends.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2.iproute import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from offbeat.lab import syscalls
from offbeat.lab.addressing import address, interface_name, port_name, subnet
from offbeat.lab.errors import LabError
from offbeat.lab.units import format_time

NO_LAB = "without any of this: --lab none (loopback, unshaped)"

_MIN_BURST_BYTES = 16 * 1024
_MAX_BURST_BYTES = 64 * 1024
_BURST_S = 0.002
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024
_NETEM_QUEUE_PACKETS = 100_000

_ROOT_HANDLE = 0x10000  # 1:
_SHAPER_HANDLE = 0x100000  # 10:
_DELAYED = 0x10001  # 1:1, the queue behind a delay
_TC_ROOT = 0xFFFFFFFF
_SCOPE_LINK = 253
_IFA_F_NOPREFIXROUTE = 0x200


@dataclass(frozen=True)
class LinkPlan:
    """One link: rate of each host in bit/s (None: unshaped) and one-way latency in seconds."""

    name: str
    rates_bps: list[int | None]
    latency_s: float


@dataclass(frozen=True)
class NetworkPlan:
    """What to build; `congestion_control` "default" keeps the kernel's."""

    name: str
    hosts: int
    congestion_control: str
    links: list[LinkPlan]

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "NetworkPlan":
        """The plan out of plain data."""
        links = [LinkPlan(**link) for link in message["links"]]
        return cls(**{**message, "links": links})


class _Namespace:
    """One anonymous network namespace: a descriptor and a netlink socket inside it."""

    def __init__(self) -> None:
        with _refusal_in_words():
            syscalls.unshare(syscalls.CLONE_NEWNET)
        self.fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _quiet_ipv6()
        self.netlink = IPRoute()
        self.netlink.link("set", index=1, state="up")

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    def index(self, interface: str) -> int:
        return next(iter(self.netlink.link_lookup(ifname=interface)))

    def close(self) -> None:
        self.netlink.close()
        os.close(self.fd)


class Network:
    """A built network; LabError in words if the kernel refuses any part of it."""

    def __init__(self, plan: NetworkPlan) -> None:
        _allow_namespaces()
        self._plan = plan
        self._switch = _Namespace()
        self._hosts: list[_Namespace] = []
        for _ in range(plan.hosts):
            self._hosts.append(_Namespace())
            _configure_tcp()
        self.congestion_control = _default_congestion_control(plan.congestion_control)
        for link in range(len(plan.links)):
            self._build_link(link)

    def host_fd(self, host: int) -> int:
        """Descriptor of the host's namespace."""
        return self._hosts[host].fd

    def inodes(self) -> list[int]:
        """Identities of all namespaces as in /proc/PID/ns/net: the switch, then the hosts."""
        return [namespace.inode for namespace in (self._switch, *self._hosts)]

    def set_rate(self, host: int, link: int, rate_bps: int | None) -> None:
        """Change both directions of one host's attachment to one link; None is unshaped."""
        delayed = self._plan.links[link].latency_s > 0
        for namespace, interface in (
            (self._hosts[host], interface_name(link)),
            (self._switch, port_name(link, host)),
        ):
            _shape(namespace.netlink, namespace.index(interface), rate_bps, delayed)

    def counters(self) -> list[list[tuple[int, int]]]:
        """Per host and link: bytes sent and received by the host's interface, headers included."""
        return [
            [_bytes_of(host, interface_name(link)) for link in range(len(self._plan.links))]
            for host in self._hosts
        ]

    def _build_link(self, link: int) -> None:
        plan = self._plan.links[link]
        netlink = self._switch.netlink
        bridge = f"br{link}"
        with _step(f"cannot make the bridge of link {plan.name!r}", "bridge"):
            netlink.link("add", ifname=bridge, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
            index = self._switch.index(bridge)
            netlink.link("set", index=index, state="up", ifalias=self._alias(plan.name))
        for host in range(self._plan.hosts):
            self._attach(host, link, index)

    def _attach(self, host: int, link: int, bridge: int) -> None:
        plan = self._plan.links[link]
        namespace = self._hosts[host]
        inner, port = interface_name(link), port_name(link, host)
        with _step(f"cannot connect host {host} to link {plan.name!r}", "veth"):
            peer = {"ifname": inner, "net_ns_fd": namespace.fd}
            self._switch.netlink.link("add", ifname=port, kind="veth", peer=peer)
        alias = self._alias(plan.name, host)
        port_index, inner_index = self._switch.index(port), namespace.index(inner)
        for netlink, index in (
            (self._switch.netlink, port_index),
            (namespace.netlink, inner_index),
        ):
            _add_shapers(netlink, index, plan, plan.rates_bps[host])
            netlink.link("set", index=index, state="up", ifalias=alias)
        self._switch.netlink.link("set", index=port_index, master=bridge)
        self._add_address(namespace.netlink, inner_index, host, link)

    def _add_address(self, netlink: IPRoute, index: int, host: int, link: int) -> None:
        own = address(host, link)
        netlink.addr("add", index=index, address=own, prefixlen=24, IFA_FLAGS=_IFA_F_NOPREFIXROUTE)
        route: dict[str, Any] = {
            "dst": subnet(link),
            "oif": index,
            "prefsrc": own,
            "scope": _SCOPE_LINK,
        }
        chosen = self._plan.congestion_control
        if chosen != "default":
            # The sysctl refuses, in a namespace, what the machine does not list as allowed for
            # everyone (cubic where the default is bbr); a route's own choice has no such limit.
            route["metrics"] = {"cc_algo": chosen}
        try:
            netlink.route("add", **route)
        except NetlinkError as error:
            raise LabError(
                f"congestion_control ({chosen!r}) is refused by this kernel ({_reason(error)}); "
                f"it has: {_available_congestion_control()}, and modules that root can load "
                f'(modprobe tcp_{chosen}); or "default"'
            ) from error

    def _alias(self, link: str, host: int | None = None) -> str:
        where = "" if host is None else f" host {host}"
        return f"offbeat {self._plan.name}: {link}{where}"[:255]


def burst_bytes(rate_bps: int) -> int:
    """Bytes that a shaper lets through at once: 2 ms of the rate, from 16 to 64 KiB.

    With 4 KiB an all-reduce of 64 KB at 100 Mbit/s took 9.1 ms instead of 7.9; with 64 KiB from 3.7
    to 23 ms, as the bucket happened to be full or not.
    """
    return min(max(int(rate_bps / 8 * _BURST_S), _MIN_BURST_BYTES), _MAX_BURST_BYTES)


def queue_bytes(rate_bps: int) -> int:
    """Bytes that wait before a shaper drops: 50 ms of the rate, at least 128 KiB."""
    return burst_bytes(rate_bps) + max(int(rate_bps / 8 * _QUEUE_S), _MIN_QUEUE_BYTES)


def _add_shapers(netlink: IPRoute, index: int, plan: LinkPlan, rate_bps: int | None) -> None:
    delayed = plan.latency_s > 0
    if delayed:
        what = f"latency ({format_time(plan.latency_s)}) of link {plan.name!r} needs netem"
        with _step(what, "sch_netem", "leave latency out"):
            netlink.tc(
                "add",
                "netem",
                index=index,
                handle=_ROOT_HANDLE,
                delay=round(plan.latency_s / 2 * 1e6),  # the way has two ends
                limit=_NETEM_QUEUE_PACKETS,
            )
    if rate_bps is not None:
        _shape(netlink, index, rate_bps, delayed)


def _shape(netlink: IPRoute, index: int, rate_bps: int | None, delayed: bool) -> None:
    """Set or remove the token bucket; behind a delay it is the delay's inner queue."""
    parent = _DELAYED if delayed else _TC_ROOT
    if rate_bps is None:
        try:
            netlink.tc("del", index=index, parent=parent)
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EINVAL):  # it was not shaped
                raise
        return
    with _step("a rate needs the token bucket filter", "sch_tbf"):
        netlink.tc(
            "replace",
            "tbf",
            index=index,
            parent=parent,
            handle=_SHAPER_HANDLE,
            rate=rate_bps // 8,  # bytes per second
            burst=burst_bytes(rate_bps),
            limit=queue_bytes(rate_bps),
        )


def _bytes_of(namespace: _Namespace, interface: str) -> tuple[int, int]:
    (link,) = namespace.netlink.get_links(namespace.index(interface))
    statistics = link.get("stats64")
    return statistics["tx_bytes"], statistics["rx_bytes"]


# --- settings of the namespace that this process is in -------------------------------------------


def _allow_namespaces() -> None:
    """Without the right to make network namespaces, enter an own user namespace first.

    Not the other way round: in a user namespace root could no longer read other users' files.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        return
    except OSError as error:
        if error.errno != errno.EPERM:
            raise LabError(_refusal(error)) from error
    user, group = os.geteuid(), os.getegid()
    with _refusal_in_words():
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        # Every rank keeps its own user and group, so that it gains no rights.
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _quiet_ipv6() -> None:
    """No IPv6: its neighbour discovery would be traffic that nobody asked for."""
    for which in ("all", "default"):
        _try_write(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6", "1")


def _configure_tcp() -> None:
    # Training sends in bursts. After a pause as long as a retransmission timeout (200 ms and up)
    # TCP would fall back to its first window, so the cost of a message would depend on the length
    # of the compute before it. Without latency the window reopens at once (1 MB after 0.6 s of
    # silence at 100 Mbit/s: 136 ms with and without); with latency it takes many round trips.
    _try_write("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "0")
    # A later connection must not inherit what an earlier one learned: runs would not be alike.
    _try_write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")


def _default_congestion_control(chosen: str) -> str:
    if chosen != "default":
        return chosen
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _available_congestion_control() -> str:
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return ", ".join(path.read_text().split()) if path.exists() else "unknown"


def _try_write(path: str, text: str) -> None:
    """Best effort: a container may mount /proc/sys read-only, a kernel may lack IPv6."""
    try:
        _write(path, text)
    except OSError:
        return


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


# --- refusals in words ---------------------------------------------------------------------------


@contextmanager
def _refusal_in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LabError(_refusal(error)) from error


def _refusal(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EUSERS):
        remedy = (
            "the limit is reached or 0: raise the sysctls user.max_net_namespaces and "
            "user.max_user_namespaces"
        )
    else:
        remedy = (
            "run as root, or allow unprivileged user namespaces (sysctls "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
            "user.max_user_namespaces above 0; in Docker --cap-add SYS_ADMIN --cap-add NET_ADMIN)"
        )
    return f"network namespaces are refused ({error.strerror}); {remedy}; {NO_LAB}"


@contextmanager
def _step(what: str, module: str, alternative: str | None = None) -> Iterator[None]:
    """Name the kernel module that a refused netlink request needs."""
    try:
        yield
    except NetlinkError as error:
        other = f"{alternative}; " if alternative else ""
        raise LabError(
            f"{what}: the kernel refuses ({_reason(error)}); it may lack the module {module} "
            f"(modprobe {module}); {other}{NO_LAB}"
        ) from error


def _reason(error: NetlinkError) -> str:
    return os.strerror(abs(error.code))
