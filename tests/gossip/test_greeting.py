"""The proof of the secret, byte by byte and without sockets."""

from __future__ import annotations

import pytest

from offbeat.frames import secret as secrets
from offbeat.frames.greeting import Greeting, GreetingError


def talk(one: Greeting, other: Greeting, spoil: int | None = None) -> None:
    """Carry bytes between both ends, one at a time; the byte of this number is changed."""
    sent = 0
    while one.missing_bytes or other.missing_bytes:
        moved = False
        for here, there in ((one, other), (other, one)):
            data, here.outgoing = here.outgoing, b""
            for byte in data:
                moved = True
                there.feed(bytes([byte ^ (sent == spoil)]))
                sent += 1
        assert moved, "both wait"


def test_who_knows_the_secret_is_believed() -> None:
    one, other = Greeting(b"secret", connects=True), Greeting(b"secret", connects=False)
    talk(one, other)
    assert one.missing_bytes == other.missing_bytes == 0


@pytest.mark.parametrize("asker", [b"secret", b"another"])
def test_who_does_not_is_refused(asker: bytes) -> None:
    """By the one that was connected to, before anything else is read."""
    one, other = Greeting(asker, connects=True), Greeting(b"third", connects=False)
    with pytest.raises(GreetingError, match="OFFBEAT_SECRET"):
        talk(one, other)
    assert other.outgoing == b""


@pytest.mark.parametrize("spoil", [0, 40, 70, 100, 127])
def test_a_byte_that_was_changed_is_noticed(spoil: int) -> None:
    with pytest.raises(GreetingError):
        talk(Greeting(b"secret", connects=True), Greeting(b"secret", connects=False), spoil)


def test_what_a_worker_has_proved_proves_no_server() -> None:
    """Or else what somebody says could be said back to him, whatever the order of the nonces."""
    one, other = secrets.nonce(), secrets.nonce()
    for mine, theirs in ((one, other), (other, one)):
        mac = secrets.proof(b"secret", b"worker", mine, theirs)
        assert not secrets.is_server_proof(b"secret", one, other, mac)
    assert secrets.is_server_proof(
        b"secret", one, other, secrets.proof(b"secret", b"server", one, other)
    )
