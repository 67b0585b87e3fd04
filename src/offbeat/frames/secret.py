"""The job's secret: both ends prove that they know it before a byte of theirs is parsed.

Server to worker: a nonce. Worker to server: its own nonce and a MAC over both. Server to worker: a
MAC over both. MACs are compared in constant time. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

VARIABLE = "OFFBEAT_SECRET"
NONCE_BYTES = 32
MAC_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
REMEDY = f"{VARIABLE} must be the same on all ranks; export the same everywhere, or none"


def own_secret() -> bytes | None:
    """The user's secret; None if there is none. ValueError for an empty one."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not text:
        raise ValueError(f"{VARIABLE} ('') must not be empty; unset it, or give a secret")
    return text.encode()


def new_secret() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(32)


def nonce() -> bytes:
    """A number used once."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, theirs: bytes, mine: bytes) -> bytes:
    """The MAC with which `role` (b"worker" or b"server") answers the other end's nonce. Who
    connects is the worker."""
    return hmac.digest(secret, b"offbeat " + role + theirs + mine, hashlib.sha256)


def answer(secret: bytes, theirs: bytes, mine: bytes) -> bytes:
    """What a worker sends to a server's nonce."""
    return mine + proof(secret, b"worker", theirs, mine)


def is_ours(secret: bytes, mine: bytes, given: bytes) -> bytes | None:
    """The worker's nonce if its answer to `mine` proves the secret, else None."""
    theirs, mac = given[:NONCE_BYTES], given[NONCE_BYTES:]
    return theirs if hmac.compare_digest(mac, proof(secret, b"worker", mine, theirs)) else None


def is_servers(secret: bytes, mine: bytes, theirs: bytes, mac: bytes) -> bool:
    """Whether the server that sent the nonce `theirs` proves the secret to the worker's `mine`."""
    return hmac.compare_digest(mac, proof(secret, b"server", mine, theirs))
