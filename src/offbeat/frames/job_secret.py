"""The secret and the addresses of a job whose processes open sockets of their own."""

from __future__ import annotations

import os
import socket
from typing import Any

from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.core.transport.interfaces import ipv4_of
from offbeat.frames import secret as secrets


def own_address(cluster: Cluster) -> str:
    """This host's address on the first link, else the one that reaches the other ranks."""
    spec = next(iter(cluster.specs.values()))
    found = ipv4_of(spec.interface) if spec.interface else None
    if found is not None:
        return str(found.ip)
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def address_towards(host: str) -> str:
    """This host's address on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: it only chooses the interface
        return s.getsockname()[0]


def common_secret(value: Any, maker: int, control: Control) -> tuple[list[Any], bytes]:
    """Everyone's value, and the job's secret: the user's, or one that rank `maker` has made.
    Ranks compare fingerprints of the user's secret, salted with nonces of this job, so that a
    fingerprint of one job tells nothing about another."""
    mine = secrets.own_secret()
    new = secrets.new_secret()
    everyone = control.gather((value, new.hex() if mine is None else None, secrets.nonce().hex()))
    salt = bytes.fromhex("".join(nonce for *_, nonce in everyone))
    digest = None if mine is None else secrets.proof(mine, b"salt", salt, b"").hex()
    digests = control.gather(digest)
    odd = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if odd:
        words = ", ".join(map(str, odd))
        raise ValueError(f"the secret of rank {words} must be that of rank 0: {secrets.REMEDY}")
    secret = mine if mine is not None else bytes.fromhex(everyone[maker][1])
    return [theirs for theirs, *_ in everyone], secret
