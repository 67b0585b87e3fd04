"""Presence of a process for the other members of its job: a socket that answers while it exists."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Literal

from offbeat.core.transport.listeners import open_listener

PROBE_S = 3.0  # longest wait for the answer of a member that may have failed
RETRY_S = 0.1  # pause after an error of this host
PROBES = 16  # probes at the same time
ANSWER_BYTES = 4096  # longest answer to a probe
# Errors of a connection that state a lack of this host, and nothing about the other one.
OWN_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
THREAD_NAME = "offbeat-member"


class Presence:
    """Socket that answers with the name of this rank as long as its process exists, and with the
    newest epoch that this rank has given up.

    After a failure the other members connect to it. If the process has ended, its host refuses the
    connection at once.

    Args:
        address: address of this host.
        name: name of this rank.

    Attributes:
        port: port of the socket.
        given_up: number of the newest epoch that this rank has given up after a failure; -1: none.
    """

    def __init__(self, address: str, name: str):
        self._name, self.given_up = name, -1
        self._listener = open_listener(address)
        self.port: int = self._listener.getsockname()[1]
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
                connection.settimeout(PROBE_S)
                connection.sendall(f"{self._name}\n{self.given_up}\n".encode())

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


Answer = Literal["ended", "unreachable", "silent", "alive"]
"""Answer of a host to a probe: its process has ended; the host does not respond; the process
accepts the connection but does not answer, so it may be stopped, or this host cannot connect; or it
answers."""


def probe(address: tuple[str, int], name: str) -> Answer:
    """Return whether the process of a rank exists.

    Args:
        address: host and port of its `Presence`.
        name: name of the rank.
    """
    return _ask(address, name)[0]


def _ask(address: tuple[str, int], name: str) -> tuple[Answer, int]:
    """Return the result of `probe`, and the newest epoch that the rank has given up; -1: none."""
    try:
        connection = socket.create_connection((address[0], address[1]), PROBE_S)
    except ConnectionRefusedError:
        return "ended", -1
    except OSError as error:
        return ("silent" if error.errno in OWN_ERRORS else "unreachable"), -1
    answer = b""
    with connection:
        connection.settimeout(PROBE_S)
        try:
            while answer.count(b"\n") < 2 and (part := connection.recv(ANSWER_BYTES)):
                answer += part
                if len(answer) > ANSWER_BYTES:  # another program has the port now
                    return "ended", -1
        except OSError:
            return "silent", -1
    found, _, number = answer.decode(errors="replace").rstrip("\n").partition("\n")
    is_whole = answer.count(b"\n") == 2 and found == name
    return ("alive", int(number)) if is_whole else ("ended", -1)


def is_gone(address: tuple[str, int], name: str, epoch: int | None = None) -> bool:
    """Return whether the process of a rank has ended, its host does not respond, or it has given
    up an epoch.

    Args:
        address: host and port of its `Presence`.
        name: name of the rank.
        epoch: number of an epoch; None for no epoch.
    """
    answer, given_up = _ask(address, name)
    return answer in ("ended", "unreachable") or (epoch is not None and given_up >= epoch)


def find_gone(addresses: Mapping[str, tuple[str, int]], epoch: int | None = None) -> list[str]:
    """Return the ranks for which `is_gone` holds.

    Args:
        addresses: host and port of each rank's `Presence`. All are probed at the same time.
        epoch: see `is_gone`.
    """
    return _find_ranks(addresses, partial(is_gone, epoch=epoch))


def find_ended(addresses: Mapping[str, tuple[str, int]]) -> list[str]:
    """Return the ranks whose hosts state that their processes have ended; see `find_gone`."""
    return _find_ranks(addresses, lambda place, rank: probe(place, rank) == "ended")


def _find_ranks(
    addresses: Mapping[str, tuple[str, int]], holds: Callable[[tuple[str, int], str], bool]
) -> list[str]:
    """Return the ranks for which a condition holds, which is examined for all at the same time."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), PROBES)) as pool:
        results = pool.map(holds, addresses.values(), addresses)
        return [rank for rank, is_found in zip(addresses, results, strict=True) if is_found]
