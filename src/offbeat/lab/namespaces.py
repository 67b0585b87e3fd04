"""Network namespaces of this process, and error messages for refusals of the kernel."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyroute2.iproute import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from offbeat.lab import syscalls
from offbeat.lab.errors import LabError

NO_LAB = "without any of this: --lab none (loopback, unshaped)"


class Namespace:
    """Anonymous network namespace: a descriptor and a netlink socket inside it."""

    def __init__(self) -> None:
        with _explain_refusal():
            syscalls.unshare(syscalls.CLONE_NEWNET)
        self.fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _disable_ipv6()
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


# --- settings of the namespace that this process is in -------------------------------------------


def allow_namespaces() -> None:
    """Enter an own user namespace if this process may not create network namespaces.

    Do not enter it otherwise: in a user namespace, root cannot read files of other users.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        return
    except OSError as error:
        if error.errno != errno.EPERM:
            raise LabError(_refusal_text(error)) from error
    user, group = os.geteuid(), os.getegid()
    with _explain_refusal():
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        # Ranks keep their user and group, so that they gain no rights.
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _disable_ipv6() -> None:
    """Disable IPv6, whose neighbour discovery would add traffic."""
    for which in ("all", "default"):
        _try_write(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6", "1")


def configure_tcp() -> None:
    """Make the cost of a message independent of earlier messages."""
    # Training sends in bursts. After a pause as long as a retransmission timeout (200 ms or more),
    # TCP returns to its initial window, so the cost of a message would depend on the length of the
    # compute before it. Without latency the window reopens immediately (1 MB after 0.6 s of silence
    # at 100 Mbit/s: 136 ms with and without). With latency it takes many round trips.
    _try_write("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "0")
    # Do not reuse metrics of earlier connections, because runs would differ.
    _try_write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")


def default_congestion_control(chosen: str) -> str:
    """Return the kernel's congestion control in place of "default"."""
    if chosen != "default":
        return chosen
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def available_congestion_control() -> str:
    """Return the names of the loaded congestion controls."""
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return ", ".join(path.read_text().split()) if path.exists() else "unknown"


def _try_write(path: str, text: str) -> None:
    """Write if possible: a container may mount /proc/sys read-only, and a kernel may lack IPv6."""
    with suppress(OSError):
        _write(path, text)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


# --- refusals in words ---------------------------------------------------------------------------


@contextmanager
def _explain_refusal() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LabError(_refusal_text(error)) from error


def _refusal_text(error: OSError) -> str:
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
def kernel_request(what: str, module: str, alternative: str | None = None) -> Iterator[None]:
    """Raise a LabError that names the required kernel module if a netlink request in the block
    fails."""
    try:
        yield
    except NetlinkError as error:
        other = f"{alternative}; " if alternative else ""
        raise LabError(
            f"{what}: the kernel refuses ({error_text(error)}); it may lack the module {module} "
            f"(modprobe {module}); {other}{NO_LAB}"
        ) from error


def error_text(error: NetlinkError) -> str:
    """Return the error number as text."""
    return os.strerror(abs(error.code))
