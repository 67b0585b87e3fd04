"""Secret of a job, and messages by which both ends of a connection prove to have it.

1. Server to worker: a nonce.
2. Worker to server: its own nonce, and a MAC over both nonces.
3. Server to worker: a MAC over both nonces.

No other data is parsed before the proof. MACs are compared in constant time. Later data is neither
encrypted nor signed.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from offbeat.frames.frames import Steps

VARIABLE, FILE_VARIABLE = "OFFBEAT_SECRET", "OFFBEAT_SECRET_FILE"
NONCE_BYTES = MAC_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
CLOSED = "the other end has closed the connection"
REMEDY = f"{VARIABLE} must be the same on all ranks; export the same everywhere, or none"


class ProofError(ConnectionError):
    """The other end has another secret, or none."""


class Exchange(Protocol):
    """Exchange of small values between all ranks, such as `Control`."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        ...


def own_secret() -> bytes | None:
    """Return the user's secret, or None. Raise ValueError if it is empty."""
    text = os.environ.get(VARIABLE)
    if text == "":
        raise ValueError(f"{VARIABLE} ('') must not be empty; unset it, or give a secret")
    return None if text is None else text.encode()


def read_secret(path: Path | None = None) -> bytes:
    """Return the secret of the membership service, the one line of a file.

    Args:
        path: the file. None reads the file that `OFFBEAT_SECRET_FILE` names, or else the secret in
            `OFFBEAT_SECRET`.

    Raises:
        ValueError: there is no secret, or the file has several.
        OSError: the file cannot be read.
    """
    named = path or os.environ.get(FILE_VARIABLE)
    if not named and (own := own_secret()):
        return own
    if not named:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file with the secret, or {VARIABLE} hold it; the "
            "membership service and all members need the same"
        )
    found = [*filter(None, map(bytes.strip, Path(named).read_bytes().splitlines()))]
    if len(found) != 1:
        raise ValueError(f"secret in {named} ({len(found)} lines) must be one line")
    return found[0]


def common_secret(value: Any, maker: int, exchange: Exchange) -> tuple[list[Any], bytes]:
    """Return every rank's value, and the secret of the job.

    The secret is the user's, or the nonce of rank `maker`. Ranks compare fingerprints of the user's
    secret, salted with the nonces of all ranks, so that those of different jobs are unrelated.

    Raises:
        ValueError: on every rank, if secrets differ between ranks.
    """
    own = own_secret()
    values, nonces = zip(*exchange.gather((value, nonce().hex())), strict=True)
    digest = None if own is None else proof(own, b"salt", bytes.fromhex("".join(nonces)), b"")
    digests = exchange.gather(digest and digest.hex())
    odd = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise ValueError(f"the secret of rank {', '.join(odd)} must be that of rank 0: {REMEDY}")
    return [*values], own or bytes.fromhex(nonces[maker])


# ---- proof ----------------------------------------------------------------------------------


def nonce() -> bytes:
    """Return a random nonce."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, role: bytes, theirs: bytes | bytearray, mine: bytes | bytearray) -> bytes:
    """Return the MAC of one end over the nonces of both ends.

    Args:
        secret: secret of the job.
        role: b"worker" for the end that connects, b"server" for the other end.
        theirs: nonce of the other end.
        mine: nonce of this end.
    """
    return hmac.digest(secret, b"offbeat " + role + theirs + mine, "sha256")


def answer(secret: bytes, theirs: bytes | bytearray, mine: bytes) -> bytes:
    """Return the worker's answer to a server's nonce: the worker's nonce and its MAC."""
    return mine + proof(secret, b"worker", theirs, mine)


def proof_steps(secret: bytes, send: Callable[[bytes], object], *, connects: bool) -> Steps:
    """Send the messages of one end, and end when the other end has proved the secret.

    Yields memory, which the caller fills with the next received bytes. It throws a
    ConnectionResetError into the generator if the other end closes the connection.

    Args:
        secret: secret of the job.
        send: sends all bytes.
        connects: whether this end has opened the connection.

    Raises:
        ProofError: the other end has not proved the secret, or rejects the own one.
    """
    mine, theirs, mac = nonce(), bytearray(NONCE_BYTES), bytearray(MAC_BYTES)
    if not connects:
        send(mine)
    yield memoryview(theirs)
    if connects:
        send(answer(secret, theirs, mine))
    try:
        yield memoryview(mac)
    except ConnectionResetError:
        raise ProofError(f"the other end does not accept this {VARIABLE}; {REMEDY}") from None
    role = b"server" if connects else b"worker"
    if not hmac.compare_digest(mac, proof(secret, role, mine, theirs)):
        raise ProofError(f"the other end does not know the secret; {REMEDY}")
    if not connects:
        send(proof(secret, b"server", theirs, mine))
