"""Greeting: the proof of the secret at the beginning of a connection, without sockets."""

from __future__ import annotations

from offbeat.frames import secret as secrets


class GreetingError(ConnectionError):
    """The other end does not know the secret."""


class Greeting:
    """One end of the proof, of who connects (`asks`) or of who was connected to.

    Send `outgoing`, read `wants` bytes, `feed` them; again until `wants` is 0.
    """

    def __init__(self, secret: bytes, *, asks: bool):
        self._secret, self._asks = secret, asks
        self._mine, self._theirs = secrets.nonce(), b""
        self._got = bytearray()
        self.outgoing = b"" if asks else self._mine
        self._due = secrets.NONCE_BYTES if asks else secrets.ANSWER_BYTES

    @property
    def wants(self) -> int:
        """Bytes to read before anything else; 0: the other end is one of ours."""
        return self._due - len(self._got)

    def feed(self, data: bytes) -> None:
        """Take bytes, no more than are wanted. GreetingError if they prove nothing."""
        self._got += data
        self.outgoing = b""
        if self.wants:
            return
        given, self._got = bytes(self._got), bytearray()
        if self._asks and not self._theirs:
            self._theirs, self._due = given, secrets.MAC_BYTES
            self.outgoing = secrets.answer(self._secret, given, self._mine)
            return
        if self._asks:
            known = secrets.is_servers(self._secret, self._mine, self._theirs, given)
        else:
            theirs = secrets.is_ours(self._secret, self._mine, given)
            known = theirs is not None
            if theirs is not None:
                self.outgoing = secrets.proof(self._secret, b"server", theirs, self._mine)
        if not known:
            raise GreetingError(f"the other end does not know the secret; {secrets.REMEDY}")
        self._due = 0
