"""Rendezvous in a part of the store that holds no keys of other processes.

A rank may reach the store of other processes. torchrun's store outlives the processes that it
restarts (torch 2.13: with `--standalone` and with one static node) and still holds their addresses.
A job that ends may still hold the port of the next job. The number of restarts does not distinguish
attempts, because each host's agent has its own count. So each process publishes a random number,
and rank 0 publishes its answer under that number.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from offbeat.core.transport.addresses import is_store_host

LOOK_EVERY_S = 0.02  # longest pause between two looks at the store; the first pauses are shorter


def connect_store(rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a part of the store at `MASTER_ADDR` for the processes of this job.

    Every rank must call it. If the connection breaks before all ranks have met, a rank that does
    not host the store connects again until `timeout_s` has passed.

    Raises:
        TimeoutError: names the ranks that are missing.
        torch.distributed.DistError: the store cannot be hosted or reached.
    """
    until_s = time.monotonic() + timeout_s
    is_host = is_store_host(rank)
    while True:
        left_s = max(until_s - time.monotonic(), LOOK_EVERY_S)
        limit: Any = {"timeout": timedelta(seconds=left_s)}
        try:
            store, *_ = next(rendezvous("env://", rank, world_size, **limit))
            part = create_prefix(store, rank, world_size, left_s)
        except dist.DistNetworkError:
            if is_host or time.monotonic() > until_s:
                raise
            time.sleep(LOOK_EVERY_S)
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return part


def create_prefix(store: Any, rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a part of the store for these processes alone. Every rank must call it.

    Raises:
        TimeoutError: names the missing ranks.
    """
    until_s = time.monotonic() + timeout_s
    token = secrets.token_hex(8)
    if rank == 0:
        _welcome(store, token, set(range(1, world_size)), until_s)
    else:
        store.set(f"offbeat/here/{rank}", token)
        answer = f"offbeat/welcome/{token}"
        pauses_s = _pauses_s()
        while not store.check([answer]):
            if time.monotonic() > until_s:
                raise TimeoutError("rank 0 has not connected")
            time.sleep(next(pauses_s))
        token = store.get(answer).decode()
        store.set(f"offbeat/in/{token}/{rank}", "")
    return PrefixStore(f"offbeat/{token}", store)


def _welcome(store: Any, token: str, missing: set[int], until_s: float) -> None:
    """Publish the token for every rank until all ranks have confirmed it."""
    pauses_s = _pauses_s()
    while missing:
        for rank in [*missing]:
            if store.check([f"offbeat/in/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([here := f"offbeat/here/{rank}"]):
                store.set(f"offbeat/welcome/{store.get(here).decode()}", token)
        if not missing:
            break
        if time.monotonic() > until_s:
            names = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(
                f"rank {names} {'has' if len(missing) == 1 else 'have'} not connected"
            )
        time.sleep(next(pauses_s))


def _pauses_s() -> Iterator[float]:
    pause_s = LOOK_EVERY_S / 32
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LOOK_EVERY_S)
