"""Secret and addresses of a job whose processes open their own sockets."""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.interfaces import ipv4_of
from offbeat.frames import secret as secrets


class Exchange(Protocol):
    """Exchange of small values between all ranks, such as `Control`."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        ...


def own_address(cluster: Cluster) -> str:
    """Return this host's address on the first link, or else the address towards `MASTER_ADDR`."""
    spec = next(iter(cluster.specs.values()))
    address = ipv4_of(spec.interface) if spec.interface else None
    if address is not None:
        return str(address.ip)
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def address_towards(host: str) -> str:
    """Return this host's address in the network through which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # a UDP connect sends nothing, it selects the interface
        return s.getsockname()[0]


def common_secret(value: Any, maker: int, exchange: Exchange) -> tuple[list[Any], bytes]:
    """Return every rank's value, and the secret of the job.

    The secret is the user's, or one that rank `maker` has drawn. Ranks compare fingerprints of the
    user's secret. Fingerprints are salted with nonces of all ranks, so that those of different jobs
    are unrelated.

    Raises:
        ValueError: on every rank, if secrets differ between ranks.
    """
    own = secrets.own_secret()
    new = secrets.new_secret()
    everyone = exchange.gather((value, new.hex() if own is None else None, secrets.nonce().hex()))
    salt = bytes.fromhex("".join(nonce for *_, nonce in everyone))
    digest = None if own is None else secrets.proof(own, b"salt", salt, b"").hex()
    digests = exchange.gather(digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        words = ", ".join(map(str, odd))
        raise ValueError(f"the secret of rank {words} must be that of rank 0: {secrets.REMEDY}")
    secret = own if own is not None else bytes.fromhex(everyone[maker][1])
    return [other_value for other_value, *_ in everyone], secret
