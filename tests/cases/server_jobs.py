"""Jobs in one process: servers on threads, clients as the workers' sessions use them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.server.client import Client
from offbeat.server.layout import Layout
from offbeat.server.optimizers import settings_of
from offbeat.server.parameters import Store
from offbeat.server.service import Service
from offbeat.server.snapshots import Snapshots

SECRET = b"among us"


class Job:
    """Some servers, and what workers need to join."""

    def __init__(self, size: int, servers: int, workers: int, rule: Any = "clock", **options: Any):
        self.parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        rate = options.pop("lr", 1.0)
        self.optimizer = torch.optim.SGD([self.parameter], lr=rate)
        self.layout = Layout([[self.parameter]], servers, options.pop("shard_bytes", 64))
        directory = options.pop("directory", None)
        self.services: list[Service] = []
        self.addresses: list[tuple[str, int]] = []
        self.errors: list[BaseException] = []
        for i in range(servers):
            listener = socket.create_server(("127.0.0.1", 0))
            self.addresses.append(listener.getsockname())
            store = Store(self.layout, i, self.optimizer, rule, range(workers))
            snapshots = Snapshots(directory, i, 2) if directory else None
            options.setdefault("silent_s", 30.0)
            self.services.append(Service(store, listener, SECRET, snapshots=snapshots, **options))
        self.threads = [
            threading.Thread(target=self._serve, args=(service,), daemon=True)
            for service in self.services
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, service: Service) -> None:
        try:
            service.serve()
        except BaseException as error:
            self.errors.append(error)

    def client(self, rank: int, **options: Any) -> Client:
        servers = [(f"server {i}", address) for i, address in enumerate(self.addresses)]
        options = {"timeout_s": 10.0, "beat_s": 1.0, "secret": SECRET, **options}
        secret = options.pop("secret")
        return Client(self.layout, servers, rank, secret, **options)

    def push(self, client: Client, value: float | Tensor, *, wait: bool = True) -> None:
        client.settle()
        client.outgoing[torch.float64].copy_(torch.as_tensor(value))
        client.push(settings_of(self.optimizer))
        if wait:
            client.settle()

    def held(self) -> Tensor:
        """The parameters, off the servers' own memory."""
        shards = [shard for s in self.services for shard in s.store.shards.values()]
        shards.sort(key=lambda shard: shard.spec.number)
        return torch.cat([shard.parameters for shard in shards])

    def wake(self) -> None:
        """Let the servers look about: a stranger knocks."""
        for address in self.addresses:
            with contextlib.suppress(OSError), socket.create_connection(address):
                pass

    def end(self) -> None:
        for thread in self.threads:
            thread.join(10)


def pulled(client: Client, need: int = 0) -> Tensor:
    """A copy of the parameters, once everybody has come that far."""
    client.pull(need)
    client.await_arrival()
    found = client.incoming[torch.float64].clone()
    client.release_incoming()
    return found


@contextmanager
def job(*args: Any, **options: Any) -> Iterator[Job]:
    made = Job(*args, **options)
    try:
        yield made
    finally:
        for service in made.services:
            for rank in list(service.store.clocks()):
                service.store.leave(rank)  # so that its loop ends
        made.wake()
        made.end()


def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
