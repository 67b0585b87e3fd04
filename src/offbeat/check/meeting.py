"""Meeting of all ranks in the job's store, and exchange of small values there."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.transport.addresses import is_local, is_store_host, require_address, resolve
from offbeat.core.transport.rendezvous import ANSWER_S, connect_store, run_limited

MEET_S = 30.0
STEP_S = 20.0  # longer than any step of the check, in which a rank waits for a lost peer
LINGER_S = 5.0  # longest time for which rank 0 keeps its store open at the end
ATTEMPT_S = 3.0
_NETWORK_ERRORS = (RuntimeError, TimeoutError)  # errors of torch's store are RuntimeErrors


class MeetingError(Exception):
    """This rank has not met all other ranks, with the cause."""


class LostRanksError(Exception):
    """Ranks have not reached the end of a step.

    Attributes:
        ranks: lost ranks. Rank 0 alone if the store does not respond.
    """

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


class Meeting:
    """Part of the job's store in which the ranks of this check exchange values.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        step: number of values that each rank has exchanged.
        seconds: seconds until all ranks had met.
    """

    def __init__(self, store: Any, rank: int, world_size: int, seconds: float = 0.0):
        self.rank, self.world_size, self.step, self.seconds = rank, world_size, 0, seconds
        self._store = store

    def part(self, name: str) -> PrefixStore:
        """Return a part of the store of its own."""
        return PrefixStore(name, self._store)

    def gather(self, value: Any = None) -> list[Any]:
        """Return every rank's value, by rank. All ranks leave this call together.

        Args:
            value: value of types that JSON supports.

        Raises:
            LostRanksError: a rank has not called this within `STEP_S` seconds.
        """
        self.step += 1
        keys = [f"{self.step}/{rank}" for rank in range(self.world_size)]
        try:
            texts = run_limited(partial(self._exchange, keys, json.dumps(value)), STEP_S + ANSWER_S)
        except _NETWORK_ERRORS as error:
            raise LostRanksError([0]) from error
        return [json.loads(text) for text in texts]

    def _exchange(self, keys: list[str], own: str) -> list[bytes]:
        self._store.set(keys[self.rank], own)
        with suppress(dist.DistStoreError):  # the timeout
            self._store.wait(keys, timedelta(seconds=STEP_S))
        lost = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if lost:
            raise LostRanksError(lost)
        return self._store.multi_get(keys)

    def close(self, lost: Collection[int] = ()) -> None:
        """Leave the store. Rank 0, which may host it, waits until the others have left.

        Args:
            lost: ranks that cannot leave any more.
        """
        others = [f"left/{rank}" for rank in range(1, self.world_size) if rank not in lost]
        if self.rank == 0:
            leave = partial(self._store.wait, others, timedelta(seconds=LINGER_S))
        else:
            leave = partial(self._store.set, f"left/{self.rank}", "")
        with suppress(*_NETWORK_ERRORS):
            run_limited(leave, LINGER_S + ANSWER_S)


def meet(rank: int, world_size: int) -> Meeting:
    """Meet all ranks in the store at `MASTER_ADDR` and `MASTER_PORT`, within `MEET_S` seconds.

    Raises:
        MeetingError: on rank 0 names the missing ranks, on another rank states the addresses that
            this rank has tried.
    """
    begin_s = time.monotonic()
    try:
        require_address(rank, os.environ, hosts_store=is_store_host(rank))
        part = connect_store(rank, world_size, MEET_S)
    except ValueError as error:
        raise MeetingError(str(error)) from None
    except TimeoutError as error:
        raise MeetingError(f"within {MEET_S:g} s {error}") from None
    except RuntimeError as error:
        raise MeetingError(_store_error(rank, error)) from None
    return Meeting(part, rank, world_size, time.monotonic() - begin_s)


def _store_error(rank: int, error: RuntimeError) -> str:
    """Return the addresses that were tried for the store, the error, and the remedy."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if is_store_host(rank):
        return f"port {port} cannot be opened ({str(error).splitlines()[0]})"
    family, address = resolve(host)
    tried = f"it resolves MASTER_ADDR ({host}) to {address}"
    if is_local((family, address)):
        return (
            f"{tried}, which is its own host, and no store listens there on port {port}. Give the "
            "address of rank 0's host, or remove that line from this host's /etc/hosts"
        )
    try:
        socket.create_connection((address, port), ATTEMPT_S).close()
        cause = "the connection opens, but no store answers"
    except OSError as refused:
        cause = refused.strerror or str(refused)
    return (
        f"{tried} and tried port {port} for {MEET_S:g} s ({cause}). Start rank 0 there, or open "
        f"TCP {port} on that host"
    )
