"""Checks of a job's address and interfaces before the first connection."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

RESOLVE_S = 10.0  # a cluster may publish the name of rank 0's host only after this rank has begun
ARRIVE_S = 3.0  # limit of a connection of rank 0 to itself
PAUSE_S = 0.5
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def require_address(rank: int, environ: Mapping[str, str], *, hosts_store: bool) -> None:
    """Raise ValueError if the job cannot meet at `MASTER_ADDR`.

    Without this check torch waits for its timeout.

    Args:
        rank: rank of this process.
        environ: environment variables.
        hosts_store: whether this rank opens the store at `MASTER_PORT`.

    Raises:
        ValueError: the name does not resolve, or this rank hosts the store and connections to the
            address do not arrive at this host, or `GLOO_SOCKET_IFNAME` names no interface.
    """
    if interface := environ.get(GLOO_INTERFACE):
        require_interfaces(GLOO_INTERFACE, interface.split(","))
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return  # torch's own error names the variable
    try:
        address = resolve(host)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR ({host}) must be the name or address of rank 0's host; rank {rank} "
            f"cannot resolve it ({error.strerror or error}). Give the address, as in "
            "torchrun --master-addr 10.0.0.1"
        ) from None
    if hosts_store and not is_local(address) and not _arrives_here(address, int(port)):
        raise ValueError(
            f"MASTER_ADDR ({host}) must be an address of rank 0's host ({socket.gethostname()}), "
            "and is one of another host. Start rank 0 there (torchrun --node-rank 0), or give "
            "this host's address"
        )


def parse_address(text: str, server: str = "a worker") -> tuple[str, int]:
    """Return (host, port) of the text `HOST:PORT`. Raise ValueError for other texts.

    Args:
        text: the text. Brackets enclose an IPv6 address.
        server: noun for the program at the address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address ({text!r}) must be HOST:PORT of {server}, as 10.0.0.1:40123")
    return host.removeprefix("[").removesuffix("]"), int(port)


def require_interfaces(option: str, names: Iterable[str]) -> None:
    """Raise ValueError unless all network interfaces exist on this host."""
    present = [name for _, name in socket.if_nameindex()]
    for name in names:
        # gloo and NCCL have prefixes and lists of exceptions, which they resolve themselves.
        if name and name[0] not in "^=" and name not in present:
            raise ValueError(
                f"{option} ({name}) must be a network interface of this host; it has "
                f"{', '.join(present)}"
            )


def resolve(host: str) -> tuple[int, str]:
    """Return (family, address) of a host. Repeat for `RESOLVE_S` seconds before raising OSError."""
    until_s = time.monotonic() + RESOLVE_S
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(PAUSE_S)


def is_local(address: tuple[int, str]) -> bool:
    """Whether an address belongs to this host: only then a socket can be bound to it."""
    family, host = address
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind((host, 0))
        return True
    return False


def _arrives_here(address: tuple[int, str], port: int) -> bool:
    """Whether a connection to an address arrives at a port of this host, as behind a translation.

    True as well if the port is in use, which the store reports itself.
    """
    token = secrets.token_bytes(8)
    family, host = address
    try:
        listener = socket.create_server(("", port), family=family)
    except OSError:
        return True
    with listener, suppress(OSError), socket.create_connection((host, port), ARRIVE_S) as sent:
        sent.sendall(token)
        until_s = time.monotonic() + ARRIVE_S
        while (left_s := until_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            arrived, _ = listener.accept()  # a rank that connects early tries again
            with arrived:
                arrived.settimeout(left_s)
                if arrived.recv(len(token)) == token:
                    return True
    return False


def is_in_use(port: int) -> bool:
    """Whether a process of this host listens on a port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def is_store_host(rank: int) -> bool:
    """Whether this rank opens the store; torchrun may have opened one."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
