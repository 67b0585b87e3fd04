"""Listening sockets of services between ranks: servers, gossip, members, checks of links."""

from __future__ import annotations

import errno
import os
import re
import socket

VARIABLE = "OFFBEAT_PORTS"


def open_listener(address: str, backlog: int = 64) -> socket.socket:
    """Return a socket that listens on a free port of an address: the first one of OFFBEAT_PORTS
    ("29600-29699"), or else one that the system chooses.

    Raises:
        ValueError: OFFBEAT_PORTS is no range of ports, or has no free port.
    """
    ports = _ports(os.environ.get(VARIABLE, ""))
    for port in ports:
        try:
            return socket.create_server((address, port), backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"{VARIABLE} ({ports.start}-{ports.stop - 1}) must have a free port on {address}; open "
        "more ports, a few per rank of the host"
    )


def _ports(text: str) -> range:
    """Return the ports that may be used; only 0, any free port, without a text."""
    if not text:
        return range(1)
    match = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 1 << 16:
        raise ValueError(f"{VARIABLE} ({text!r}) must be a range of ports, such as 29600-29699")
    return range(int(match[1]), int(match[2]) + 1)
