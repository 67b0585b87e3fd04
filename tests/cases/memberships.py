"""A membership service in a thread of the test, and its clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.membership import Epoch, JoinRequest, Membership, MembershipClient
from offbeat.membership.service import MembershipService, open_service

SECRET = b"secret of this test"


def reserved_port() -> socket.socket:
    """A socket that keeps a port for services: no connection of this host gets it meanwhile."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


class ServiceHost:
    """Starts, ends and restarts a service at one address and one journal."""

    def __init__(self, journal: Path):
        self.journal, self.reports = journal, list[str]()
        self._reserved = reserved_port()
        self._clients: list[MembershipClient] = []
        self.service = self._start()

    @property
    def address(self) -> str:
        return self.service.address

    def _start(self) -> MembershipService:
        port = self._reserved.getsockname()[1]
        service = open_service(self.journal, "127.0.0.1", port, SECRET, self.reports.append)
        self._thread = threading.Thread(target=service.serve, daemon=True)
        self._thread.start()
        return service

    def end(self) -> None:
        self.service.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def restart(self) -> None:
        self.end()
        self.service = self._start()

    def client(self, secret: bytes = SECRET, timeout_s: float = 20.0) -> MembershipClient:
        client = MembershipClient(self.address, secret, timeout_s)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.end()
        self._reserved.close()


@contextmanager
def hosted(journal: Path, **options: Any) -> Iterator[ServiceHost]:
    host = ServiceHost(journal, **options)
    try:
        yield host
    finally:
        host.close()


def begin(membership: Membership, *members: str) -> Epoch:
    """Epoch 0."""
    return membership.propose(Epoch(0, members))


def admit(membership: Membership, number: int, *members: str, **values: Any) -> Epoch:
    """An epoch whose new members have requested to join."""
    known = membership.state().epoch
    assert known is not None
    for member in members:
        if member not in known.members:
            membership.request_join(JoinRequest(member))
    return membership.propose(Epoch(number, members, **values))


def run_threads(work: Callable[[int], object], count: int) -> None:
    """Call `work` with 0, 1, ... in threads that begin together; raise the first error."""
    barrier, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        barrier.wait(20)
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
