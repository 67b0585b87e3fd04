"""Presence of a process for the other members of its job: a socket that answers while it exists."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any, Literal

from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.interfaces import ipv4_of

PROBE_S = 3.0  # longest wait for the answer of a member that may have failed
THREAD_NAME = "offbeat-member"


def own_address(interface: str | None, service: Any) -> str:
    """Return the address of this host at which the other members reach it: that of the interface,
    or else that from which it reaches the service."""
    found = None if interface is None else ipv4_of(interface)
    if found is not None:
        return str(found.ip)
    if not isinstance(service, str):
        return "127.0.0.1"
    host, port = parse_address(service)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)
        return str(s.getsockname()[0])


class Presence:
    """Socket that answers with the name of this member as long as its process exists.

    After a failure the other members connect to it. If the process has ended, its host refuses the
    connection at once.

    Args:
        address: address of this host.
        name: name of this member.

    Attributes:
        port: port of the socket.
    """

    def __init__(self, address: str, name: str):
        self._name = name.encode()
        self._listener = socket.create_server((address, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name=THREAD_NAME, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with suppress(OSError), connection:
                connection.settimeout(PROBE_S)
                connection.sendall(self._name)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


Answer = Literal["ended", "unreachable", "silent", "alive"]
"""Answer of a host to a probe: its process has ended; the host does not respond; the process
accepts the connection but does not answer, so it may be stopped; or it answers."""


def probe(address: tuple[str, int], name: str) -> Answer:
    """Return whether the process of a rank exists.

    Args:
        address: host and port of its `Presence`.
        name: name of the rank.
    """
    try:
        connection = socket.create_connection((address[0], address[1]), PROBE_S)
    except ConnectionRefusedError:
        return "ended"
    except OSError:
        return "unreachable"
    with connection:
        connection.settimeout(PROBE_S)
        try:
            answer = connection.recv(4096)
        except OSError:
            return "silent"
    return "alive" if answer == name.encode() else "ended"


def is_gone(address: tuple[str, int], name: str) -> bool:
    """Return whether the process of a rank has ended, or its host does not respond."""
    return probe(address, name) in ("ended", "unreachable")
