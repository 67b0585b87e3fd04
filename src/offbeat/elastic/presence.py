"""Presence of a process for the other members of its job: a socket that answers while it exists."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from offbeat.core.transport.listeners import open_listener

PROBE_S = 3.0  # longest wait for the answer of a member that may have failed
PROOF_S = 1.0  # longest time for the proof of a process that asks, as others wait meanwhile
RETRY_S = 0.1  # pause after an error of this host
PROBES = 16  # probes at the same time
ANSWER_BYTES = 32  # longest answer to a probe
# Errors of a connection that state a lack of this host, and nothing about the other one.
OWN_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
THREAD_NAME = "offbeat-member"


class Presence:
    """Socket that answers as long as its process exists, with the newest epoch that this rank has
    given up.

    After a failure the other members connect to it, and both ends prove that they have its token,
    which the membership service has given them. If the process has ended, its host refuses the
    connection at once.

    Args:
        address: address of this host.

    Attributes:
        place: host, port and token.
        given_up: number of the newest epoch that this rank has given up after a failure; -1: none.
    """

    def __init__(self, address: str):
        self._token, self.given_up = secrets.token_hex(16), -1
        self._listener = open_listener(address)
        self.place = [address, self._listener.getsockname()[1], self._token]
        threading.Thread(target=self._answer, name=THREAD_NAME, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # closed
                    return
                time.sleep(RETRY_S)  # for a moment this process has too many open files
                continue
            with suppress(OSError), connection:
                prove_token(connection, self._token, connects=False, limit_s=PROOF_S)
                connection.sendall(f"{self.given_up}\n".encode())

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


Answer = Literal["ended", "unreachable", "silent", "alive"]
"""Answer of a host to a probe: its process has ended; the host does not respond; the process
accepts the connection but does not answer, so it may be stopped, or this host cannot connect; or it
answers."""


def prove_token(connection: socket.socket, token: str, *, connects: bool, limit_s: float) -> None:
    """Prove to the other end that this end has the token, and require the same.

    Raises:
        ConnectionError: the other end has closed the connection, or does not have the token.
        TimeoutError: the proof has taken longer than `limit_s` seconds.
    """
    # Imported here, because jobs without changing members do not need the module.
    from offbeat.frames.connection import prove

    prove(connection, token.encode(), connects=connects, until_s=time.monotonic() + limit_s)


Place = Sequence[Any]
"""Host, port and token of a `Presence`."""


def probe(place: Place) -> Answer:
    """Return whether the process of a rank exists."""
    return _ask(place)[0]


def _ask(place: Place) -> tuple[Answer, int]:
    """Return the result of `probe`, and the newest epoch that the rank has given up; -1: none."""
    host, port, token = place
    try:
        connection = socket.create_connection((host, port), PROBE_S)
    except ConnectionRefusedError:
        return "ended", -1
    except OSError as error:
        return ("silent" if error.errno in OWN_ERRORS else "unreachable"), -1
    answer = b""
    with connection:
        try:
            prove_token(connection, token, connects=True, limit_s=PROBE_S)
            while not answer.endswith(b"\n") and (part := connection.recv(ANSWER_BYTES)):
                answer += part
        except ConnectionError:  # it has ended meanwhile, or another program has the port now
            return "ended", -1
        except OSError:
            return "silent", -1
    return ("alive", int(answer)) if answer.endswith(b"\n") else ("ended", -1)


def is_gone(place: Place, epoch: int | None = None) -> bool:
    """Return whether the process of a rank has ended, its host does not respond, or it has given
    up an epoch.

    Args:
        place: place of its `Presence`.
        epoch: number of an epoch; None for no epoch.
    """
    answer, given_up = _ask(place)
    return answer in ("ended", "unreachable") or (epoch is not None and given_up >= epoch)


def find_gone(places: Mapping[str, Place], epoch: int | None = None) -> list[str]:
    """Return the ranks for which `is_gone` holds.

    Args:
        places: place of each rank's `Presence`. All are probed at the same time.
        epoch: see `is_gone`.
    """
    return _find_ranks(places, partial(is_gone, epoch=epoch))


def find_ended(places: Mapping[str, Place]) -> list[str]:
    """Return the ranks whose hosts state that their processes have ended; see `find_gone`."""
    return _find_ranks(places, lambda place: probe(place) == "ended")


def _find_ranks(places: Mapping[str, Place], holds: Callable[[Place], bool]) -> list[str]:
    """Return the ranks for which a condition holds, which is examined for all at the same time."""
    if not places:
        return []
    with ThreadPoolExecutor(min(len(places), PROBES)) as pool:
        results = pool.map(holds, places.values())
        return [rank for rank, is_found in zip(places, results, strict=True) if is_found]
