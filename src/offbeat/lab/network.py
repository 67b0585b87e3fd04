"""Network of the lab: anonymous namespaces, bridges, veth pairs and shapers, over netlink.

If the kernel cannot provide the delays or losses of a link, the link has a switch in user space
(`switch`) in place of a bridge. This module runs in the supervisor process. No namespace has a
name: each exists while it has a descriptor or a process, so the kernel removes everything when the
supervisor ends.
"""

import errno
from collections.abc import Sequence
from typing import Any

from pyroute2.iproute import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from offbeat.core.units import format_time
from offbeat.lab import syscalls
from offbeat.lab.addressing import address, interface_name, port_name, subnet
from offbeat.lab.errors import LabError
from offbeat.lab.namespaces import (
    NO_LAB,
    Namespace,
    allow_namespaces,
    available_congestion_control,
    configure_tcp,
    default_congestion_control,
    error_text,
    kernel_request,
)
from offbeat.lab.probe import measure, measure_at_once
from offbeat.lab.probe_report import ProbeResult, ProbeTarget
from offbeat.lab.shaping import (
    bridged_segments_bytes,
    burst_bytes,
    queue_bytes,
    segments_bytes,
)
from offbeat.lab.switch.link_state import ChangePlan, LinkPlan, NetworkPlan
from offbeat.lab.switch.switch import Switch
from offbeat.lab.switch.tap import mac, open_tap

_NETEM_QUEUE_PACKETS = 100_000

_ROOT_HANDLE = 0x10000  # 1:
_SHAPER_HANDLE = 0x100000  # 10:
_DELAYED = 0x10001  # 1:1, the inner queue of netem
_TC_ROOT = 0xFFFFFFFF
_LOOPBACK = 1
_SCOPE_LINK = 253
_IFA_F_NOPREFIXROUTE = 0x200


class Network:
    """Built network. A LabError with the reason is raised if the kernel refuses a part of it."""

    def __init__(self, plan: NetworkPlan) -> None:
        allow_namespaces()
        self._plan = plan
        self._plans = list(plan.links)  # plans in force, by link
        self._center = Namespace()
        self._hosts: list[Namespace] = []
        for _ in range(plan.hosts):
            self._hosts.append(Namespace())
            configure_tcp()
            if plan.inside_bps is not None:
                _shape_loopback(self._hosts[-1], plan.inside_bps)
        self.congestion_control = default_congestion_control(plan.congestion_control)
        self.switched = self._switched_links()
        for link in range(len(plan.links)):
            if link not in self.switched:
                self._build_bridge(link)
        taps = {link: self._build_taps(link) for link in self.switched}
        self.switch = Switch(taps, {link: plan.links[link] for link in taps}) if taps else None

    def describe(self) -> dict[str, Any]:
        """Return the congestion control, the links with a switch, the descriptors of the hosts'
        namespaces, and the identities of all namespaces as in /proc/PID/ns/net: the center, then
        the hosts."""
        return {
            "congestion_control": self.congestion_control,
            "switched": self.switched,
            "fds": [host.fd for host in self._hosts],
            "inodes": [namespace.inode for namespace in (self._center, *self._hosts)],
        }

    def probe(self, ways: Sequence[ProbeTarget], budget_s: float) -> list[ProbeResult]:
        """Return the measured values of ways, one after the other."""
        return measure(self._enter, ways, budget_s)

    def flood(self, ways: Sequence[ProbeTarget], limit_s: float) -> list[float]:
        """Return the measured rates of ways, all at once."""
        return measure_at_once(self._enter, ways, limit_s)

    def change(self, change: ChangePlan) -> None:
        """Apply new values on one link."""
        self._apply_plan(change.link, change.apply_to(self._plans[change.link]))

    def restore(self) -> None:
        """Give all links their initial values."""
        for link, plan in enumerate(self._plan.links):
            self._apply_plan(link, plan)

    def counters(self) -> list[list[tuple[int, int]]]:
        """Return the bytes sent and received by each interface, by host and link, headers
        included."""
        return [
            [_bytes_of(host, interface_name(link)) for link in range(len(self._plan.links))]
            for host in self._hosts
        ]

    def inside_counters(self) -> list[tuple[int, int]]:
        """Return the bytes sent and received by the loopback of each host, headers included."""
        return [_bytes_of(host, "lo") for host in self._hosts]

    def _enter(self, host: int) -> None:
        """Move this process into the host's namespace."""
        syscalls.setns(self._hosts[host].fd, syscalls.CLONE_NEWNET)

    def _apply_plan(self, link: int, plan: LinkPlan) -> None:
        before, self._plans[link] = self._plans[link], plan
        if plan == before:
            return
        for host, rate_bps in enumerate(plan.rates_bps):
            if rate_bps != before.rates_bps[host]:
                self._set_rate(link, host, plan)
        if link in self.switched:
            assert self.switch is not None
            self.switch.change(link, plan)

    def _set_rate(self, link: int, host: int, plan: LinkPlan) -> None:
        """Set the rate at which the host sends and, on a bridge, at which it receives."""
        ends = [(self._hosts[host], interface_name(link), plan.uplink_bps(host))]
        if link not in self.switched:
            ends.append((self._center, port_name(link, host), plan.rates_bps[host]))
        delayed = link not in self.switched and self._plan.links[link].has_delay_or_loss
        for namespace, interface, rate_bps in ends:
            index = namespace.index(interface)
            _shape(namespace.netlink, index, rate_bps, delayed)
            _limit_segments(namespace.netlink, index, rate_bps, link in self.switched)

    # --- links with a bridge, and links with a switch in user space
    # --------------------------------

    def _switched_links(self) -> tuple[int, ...]:
        links = range(len(self._plan.links))
        delayed = [link for link in links if self._plan.links[link].has_delay_or_loss]
        netem = not delayed or _has_netem(self._center.netlink)
        return tuple(
            link
            for link in links
            if self._plan.links[link].switched or (link in delayed and not netem)
        )

    def _build_bridge(self, link: int) -> None:
        plan = self._plan.links[link]
        netlink = self._center.netlink
        bridge = f"br{link}"
        with kernel_request(f"cannot make the bridge of link {plan.name!r}", "bridge"):
            netlink.link("add", ifname=bridge, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
            index = self._center.index(bridge)
            netlink.link("set", index=index, state="up")
        for host in range(self._plan.hosts):
            self._attach(host, link, index)

    def _attach(self, host: int, link: int, bridge: int) -> None:
        plan = self._plan.links[link]
        namespace = self._hosts[host]
        inner, port = interface_name(link), port_name(link, host)
        with kernel_request(f"cannot connect host {host} to link {plan.name!r}", "veth"):
            peer = {"ifname": inner, "net_ns_fd": namespace.fd}
            self._center.netlink.link("add", ifname=port, kind="veth", peer=peer)
        port_index, inner_index = self._center.index(port), namespace.index(inner)
        for netlink, index, rate_bps in (
            (self._center.netlink, port_index, plan.rates_bps[host]),
            (namespace.netlink, inner_index, plan.uplink_bps(host)),
        ):
            # A packet passes both ends, so each has half of the delay. Only one end drops packets.
            loss = plan.losses[host] if netlink is namespace.netlink else 0.0
            _add_shapers(netlink, index, plan, plan.latencies_s[host] / 2, loss, rate_bps)
            netlink.link("set", index=index, state="up")
        self._center.netlink.link("set", index=port_index, master=bridge)
        self._add_address(namespace.netlink, inner_index, host, link)

    def _build_taps(self, link: int) -> list[int]:
        """Create a TAP device in every host; return their other ends, by host."""
        plan, name, taps = self._plan.links[link], interface_name(link), []
        for host, namespace in enumerate(self._hosts):
            try:
                taps.append(open_tap(name, namespace.fd, segments=not plan.has_loss))
            except OSError as error:
                raise LabError(
                    f"link {plan.name!r} asks for {_describe_request(plan)}, which needs the "
                    "module sch_netem (for a whole link) or TAP devices, and the kernel refuses "
                    f"these ({error.strerror}): load the module tun and run as root, so that "
                    f"/dev/net/tun can be opened (in Docker --device /dev/net/tun); {NO_LAB}"
                ) from error
            index = namespace.index(name)
            namespace.netlink.link(
                "set",
                index=index,
                state="up",
                address=mac(link, host).hex(":"),
            )
            uplink_bps = plan.uplink_bps(host)
            _limit_segments(namespace.netlink, index, uplink_bps, switched=True)
            if uplink_bps is not None:
                _shape(namespace.netlink, index, uplink_bps, False)
            self._add_address(namespace.netlink, index, host, link)
        return taps

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
            # In a namespace, the sysctl refuses a congestion control that is not allowed for all
            # users (cubic if the default is bbr). A route's congestion control has no such limit.
            route["metrics"] = {"cc_algo": chosen}
        try:
            netlink.route("add", **route)
        except NetlinkError as error:
            raise LabError(
                f"congestion_control ({chosen!r}) is refused by this kernel ({error_text(error)}); "
                f"it has: {available_congestion_control()}, and modules that root can load "
                f'(modprobe tcp_{chosen}); or "default"'
            ) from error


def _describe_request(plan: LinkPlan) -> str:
    """Describe the values that require netem or the switch in user space."""
    if not plan.has_delay_or_loss:
        return "differences between pairs of hosts or over time"
    values = {"latency": max(plan.latencies_s), "loss": max(plan.losses)}
    words = {"latency": format_time(values["latency"]), "loss": f"{values['loss']:g}"}
    asked = [f"{name} ({words[name]})" for name, value in values.items() if value]
    return " and ".join(asked) or "a latency or loss of a pair"


def _has_netem(netlink: IPRoute) -> bool:
    """Return whether this kernel has netem."""
    try:
        netlink.tc("add", "netem", index=_LOOPBACK, handle=_ROOT_HANDLE, delay=1)
    except NetlinkError:
        return False
    netlink.tc("del", index=_LOOPBACK, parent=_TC_ROOT)
    return True


def _add_shapers(
    netlink: IPRoute, index: int, plan: LinkPlan, delay_s: float, loss: float, rate_bps: int | None
) -> None:
    if plan.has_delay_or_loss:
        what = f"{_describe_request(plan)} of link {plan.name!r} needs netem"
        with kernel_request(what, "sch_netem", "leave it out"):
            netlink.tc(
                "add",
                "netem",
                index=index,
                handle=_ROOT_HANDLE,
                delay=round(delay_s * 1e6),
                loss=loss * 100,
                limit=_NETEM_QUEUE_PACKETS,
            )
    if rate_bps is not None:
        _shape(netlink, index, rate_bps, plan.has_delay_or_loss)
        _limit_segments(netlink, index, rate_bps, switched=False)


def _shape(netlink: IPRoute, index: int, rate_bps: int | None, delayed: bool) -> None:
    """Set or remove the token bucket. With netem, the token bucket is the inner queue of netem."""
    parent = _DELAYED if delayed else _TC_ROOT
    if rate_bps is None:
        try:
            netlink.tc("del", index=index, parent=parent)
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EINVAL):  # the interface was not shaped
                raise
        return
    with kernel_request("a rate needs the token bucket filter", "sch_tbf"):
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


def _shape_loopback(host: Namespace, rate_bps: int) -> None:
    """Set the rate of a host's loopback. Packets must fit into a burst, or the shaper drops
    them."""
    most = segments_bytes(rate_bps)
    host.netlink.link("set", index=_LOOPBACK, mtu=max(1500, most - most % 4), state="up")
    _shape(host.netlink, _LOOPBACK, rate_bps, delayed=False)


def _limit_segments(netlink: IPRoute, index: int, rate_bps: int | None, switched: bool) -> None:
    """Limit the size of TCP segments."""
    most = segments_bytes(rate_bps) if switched else bridged_segments_bytes(rate_bps)
    netlink.link("set", index=index, gso_max_size=most)


def _bytes_of(namespace: Namespace, interface: str) -> tuple[int, int]:
    (link,) = namespace.netlink.get_links(namespace.index(interface))
    statistics = link.get("stats64")
    return statistics["tx_bytes"], statistics["rx_bytes"]
