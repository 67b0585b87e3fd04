"""Mutual proof of the secret at the beginning of a connection, independent of sockets."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.frames import secret as secrets


class GreetingError(ConnectionError):
    """The other end has another secret, or none."""


class Greeting:
    """One end of the proof.

    Repeat until `missing_bytes` is 0: send `outgoing`, read at most `missing_bytes` bytes, and pass
    them to `feed`.

    Args:
        secret: secret of the job; or all secrets that the end accepts that has not opened the
            connection.
        connects: whether this end has opened the connection.
    """

    def __init__(self, secret: bytes | Sequence[bytes], *, connects: bool):
        self._accepted = (secret,) if isinstance(secret, bytes) else tuple(secret)
        self._secret, self._connects = self._accepted[0], connects
        self._own_nonce, self._peer_nonce = secrets.nonce(), b""
        self._got = bytearray()
        self.outgoing = b"" if connects else self._own_nonce
        self._due = secrets.NONCE_BYTES if connects else secrets.ANSWER_BYTES

    @property
    def missing_bytes(self) -> int:
        """Number of bytes still to read. 0 means that the other end has proved the secret."""
        return self._due - len(self._got)

    def feed(self, data: bytes) -> None:
        """Process received bytes, at most `missing_bytes`; none if the other end has closed.

        Raises:
            GreetingError: the other end has not proved the secret, or rejects the own one.
            ConnectionResetError: the other end has closed the connection before any proof.
        """
        if not data and self._peer_nonce:
            raise GreetingError(
                f"the other end does not accept this {secrets.VARIABLE}; {secrets.REMEDY}"
            )
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._got += data
        self.outgoing = b""
        if self.missing_bytes:
            return
        given, self._got = bytes(self._got), bytearray()
        if self._connects and not self._peer_nonce:
            self._peer_nonce, self._due = given, secrets.MAC_BYTES
            self.outgoing = secrets.answer(self._secret, given, self._own_nonce)
            return
        if self._connects:
            known = secrets.is_server_proof(self._secret, self._own_nonce, self._peer_nonce, given)
        else:
            known = False
            for secret in self._accepted:
                theirs = secrets.verified_nonce(secret, self._own_nonce, given)
                if theirs is not None and not known:
                    known = True
                    self.outgoing = secrets.proof(secret, b"server", theirs, self._own_nonce)
        if not known:
            raise GreetingError(f"the other end does not know the secret; {secrets.REMEDY}")
        self._due = 0
