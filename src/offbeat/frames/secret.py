"""Secret of a job, and messages by which both ends of a connection prove to have it.

1. Server to worker: a nonce.
2. Worker to server: its own nonce, and a MAC over both nonces.
3. Server to worker: a MAC over both nonces.

No other data is parsed before the proof. MACs are compared in constant time. Later data is neither
encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

VARIABLE = "OFFBEAT_SECRET"
FILE_VARIABLE = "OFFBEAT_SECRET_FILE"
MOST_SECRETS = 2  # valid at the same time, while a new secret replaces an old one
NONCE_BYTES = 32
MAC_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
REMEDY = f"{VARIABLE} must be the same on all ranks; export the same everywhere, or none"


def own_secret() -> bytes | None:
    """Return the user's secret, or None. Raise ValueError if it is empty."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not text:
        raise ValueError(f"{VARIABLE} ('') must not be empty; unset it, or give a secret")
    return text.encode()


def read_secrets(path: Path | None = None) -> tuple[bytes, ...]:
    """Return the valid secrets of the membership service, one for each line of a file.

    Args:
        path: the file. None reads the file that `OFFBEAT_SECRET_FILE` names, or else the secret in
            `OFFBEAT_SECRET`.

    Raises:
        ValueError: there is no secret, or the file has more than two.
        OSError: the file cannot be read.
    """
    named = os.environ.get(FILE_VARIABLE)
    if path is None and not named:
        own = own_secret()
        if own is None:
            raise ValueError(
                f"{FILE_VARIABLE} must name a file with the secret, or {VARIABLE} hold it; the "
                "membership service and all members need the same"
            )
        return (own,)
    path = Path(named or "") if path is None else path
    found = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    if not 1 <= len(found) <= MOST_SECRETS:
        raise ValueError(
            f"secrets in {path} ({len(found)}) must be 1 to {MOST_SECRETS} lines; the second one "
            "is for the time in which a new secret replaces an old one"
        )
    return found


def new_secret() -> bytes:
    """Return a random secret for one job."""
    return secrets.token_bytes(32)


def nonce() -> bytes:
    """Return a random nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, theirs: bytes, mine: bytes) -> bytes:
    """Return the MAC of one end over the nonces of both ends.

    Args:
        secret: secret of the job.
        role: b"worker" for the end that connects, b"server" for the other end.
        theirs: nonce of the other end.
        mine: nonce of this end.
    """
    return hmac.digest(secret, b"offbeat " + role + theirs + mine, hashlib.sha256)


def answer(secret: bytes, theirs: bytes, mine: bytes) -> bytes:
    """Return the worker's answer to a server's nonce: the worker's nonce and its MAC."""
    return mine + proof(secret, b"worker", theirs, mine)


def verified_nonce(secret: bytes, mine: bytes, given: bytes) -> bytes | None:
    """Return the nonce of a worker if its answer to the nonce `mine` proves the secret.

    Return None if it does not.
    """
    theirs, mac = given[:NONCE_BYTES], given[NONCE_BYTES:]
    return theirs if hmac.compare_digest(mac, proof(secret, b"worker", mine, theirs)) else None


def is_server_proof(secret: bytes, mine: bytes, theirs: bytes, mac: bytes) -> bool:
    """Whether `mac` proves that the server has the secret.

    `mine` is the worker's nonce, `theirs` the server's.
    """
    return hmac.compare_digest(mac, proof(secret, b"server", mine, theirs))
