"""Rendezvous in a part of the store that holds no keys of other processes.

A rank may reach the store of other processes. torchrun's store outlives the processes that it
restarts (torch 2.13: with `--standalone` and with one static node) and still holds their addresses.
A job that ends may still hold the port of the next job. The number of restarts does not distinguish
attempts, because each host's agent has its own count. So each process publishes a random number,
and rank 0 publishes its answer under that number.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.transport.addresses import is_in_use, is_store_host

RETRY_S = 0.02  # pause before another connection; least limit of a wait
# Shortest and longest pause between two looks of rank 0. A look takes several requests for each
# missing rank, which would compete with the start of these ranks on the same machine.
FIRST_PAUSE_S, PAUSE_S = 0.001, 0.1
ANSWER_S = 3.0  # longest time for an answer of the store beyond the limit of a request
CHECK_EVERY_S = 0.2  # seconds between two checks whether a request is to be given up
READ_S = 1.0  # time for which rank 0 keeps the store open after an error


def connect_store(rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a part of the store at `MASTER_ADDR` for the processes of this job.

    Every rank must call it. If the connection breaks before all ranks have met, a rank that does
    not host the store connects again until `timeout_s` has passed.

    Raises:
        TimeoutError: names the ranks that are missing.
        ValueError: `MASTER_ADDR` or `MASTER_PORT` is not set.
        torch.distributed.DistError: the store cannot be hosted or reached.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        left_s = max(until_s - time.monotonic(), RETRY_S)
        try:
            store = open_store(rank, world_size, left_s)
            part = create_prefix(store, rank, world_size, left_s)
        except dist.DistNetworkError:
            if is_store_host(rank) or time.monotonic() > until_s:
                raise
            time.sleep(RETRY_S)
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return part


def open_store(rank: int, world_size: int, timeout_s: float) -> TCPStore:
    """Return the store at `MASTER_ADDR` and `MASTER_PORT`, without a wait for other ranks.

    Rank 0 hosts it, unless torchrun does.

    Raises:
        ValueError: `MASTER_ADDR` or `MASTER_PORT` is not set, the port is no number, or another
            process of rank 0's host uses it.
        torch.distributed.DistError: the store cannot be hosted or reached.
    """
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal():
        raise ValueError(
            f"MASTER_ADDR ({host}) and MASTER_PORT ({port}) must be address and port of rank 0; "
            "torchrun sets both"
        )
    try:
        return TCPStore(
            host,
            int(port),
            world_size,
            is_master=is_store_host(rank),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # torch would not name the missing ranks
            multi_tenant=True,  # the store of an earlier group of this process may still be open
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as in torch's own rendezvous
        )
    except dist.DistNetworkError as error:
        if is_store_host(rank) and is_in_use(int(port)):
            raise ValueError(
                f"MASTER_PORT ({port}) must be free on rank 0's host, and another process uses it, "
                "perhaps a job that has not ended; choose another port, as in "
                "torchrun --master-port 29511"
            ) from error
        raise


def create_prefix(store: Any, rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a part of the store for these processes alone, once all of them have connected.

    Every rank must call it.

    Raises:
        TimeoutError: names the missing ranks.
    """
    enter = partial(_enter, store, rank, world_size, time.monotonic() + timeout_s)
    return run_limited(enter, max(timeout_s, 0.0) + READ_S + ANSWER_S)


def _enter(store: Any, rank: int, world_size: int, until_s: float) -> PrefixStore:
    token = secrets.token_hex(8)
    if rank == 0:
        _welcome(store, token, world_size, until_s)
    else:
        store.set(f"offbeat/here/{rank}", token)
        answer = f"offbeat/welcome/{token}"
        if not _appears(store, answer, until_s):
            raise TimeoutError("rank 0 has not connected")
        token = store.get(answer).decode()
        store.set(f"offbeat/in/{token}/{rank}", "")
        met = f"offbeat/met/{token}"
        if not _appears(store, met, until_s):
            missing = _missing(store, token, range(1, world_size))
            raise TimeoutError(_describe_missing(missing or [0]))
        if error := store.get(met).decode():
            raise TimeoutError(error)
    return PrefixStore(f"offbeat/{token}", store)


def _welcome(store: Any, token: str, world_size: int, until_s: float) -> None:
    """Publish the token for every rank until all ranks have confirmed it."""
    missing, pause_s, welcome = [*range(1, world_size)], FIRST_PAUSE_S, dict[int, bytes]()
    while missing := _missing(store, token, missing):
        absent = {*_without_key(store, here := "offbeat/here/", missing)}
        for rank in missing:
            if rank not in absent:
                theirs = store.get(f"{here}{rank}")
                if welcome.get(rank) != theirs:  # another process may have stored an earlier one
                    store.set(f"offbeat/welcome/{theirs.decode()}", token)
                    welcome[rank], pause_s = theirs, FIRST_PAUSE_S
        if time.monotonic() > until_s and (missing := _missing(store, token, missing)):
            text = _describe_missing(missing)
            store.set(f"offbeat/met/{token}", text)
            time.sleep(READ_S)  # other ranks lose the store if this process ends
            raise TimeoutError(text)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S)
    store.set(f"offbeat/met/{token}", "")


def _missing(store: Any, token: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not confirmed the token."""
    return _without_key(store, f"offbeat/in/{token}/", ranks)


def _without_key(store: Any, prefix: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks without a key of this prefix."""
    keys = missing_keys(store, [f"{prefix}{rank}" for rank in ranks])
    return [int(key.removeprefix(prefix)) for key in keys]


def missing_keys(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that the store does not have.

    One request covers all keys if none is missing. Each missing key takes at most 2 log2 n more.
    """
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return [*missing_keys(store, keys[:half]), *missing_keys(store, keys[half:])]


def _describe_missing(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} {'has' if len(ranks) == 1 else 'have'} not connected"


def _appears(store: Any, key: str, until_s: float) -> bool:
    """Return whether a key exists at some time before `until_s`."""
    left_s = max(until_s - time.monotonic(), RETRY_S)  # 0 would be no limit
    try:
        store.wait([key], timedelta(seconds=left_s))
    except dist.DistStoreError:
        return False
    return True


def run_checked(
    request: Callable[[], Any], timeout_s: float, check: Callable[[], None] | None
) -> Any:
    """Return the result of a request to the store, or to other ranks, which a check may give up.

    Args:
        request: the request, whose own timeout is `timeout_s`.
        timeout_s: timeout in seconds.
        check: see `run_limited`; None: the request runs in this thread.

    Raises:
        RuntimeError: the request has lasted much longer than its timeout.
    """
    if check is None:
        return request()
    try:
        return run_limited(request, timeout_s + ANSWER_S, check)
    except TimeoutError as error:
        raise RuntimeError(str(error)) from error


def run_limited(
    request: Callable[[], Any], limit_s: float, check: Callable[[], None] | None = None
) -> Any:
    """Return the result of a request to the store, or to other ranks.

    torch has no limit for most requests. The answer may never arrive, for example if the network
    drops large packets.

    Args:
        request: the request. If it is given up, it continues in its thread.
        limit_s: longest time for it in seconds.
        check: called every `CHECK_EVERY_S` seconds during the request; raises to give it up.

    Raises:
        TimeoutError: the request has lasted longer than `limit_s`.
    """
    done, outcome = threading.Event(), list[tuple[Any, BaseException | None]]()

    def run() -> None:
        try:
            outcome.append((request(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    end_s = time.monotonic() + limit_s
    while True:
        left_s = max(end_s - time.monotonic(), 0.0)
        if done.wait(left_s if check is None else min(left_s, CHECK_EVERY_S)):
            break
        if time.monotonic() >= end_s:
            raise TimeoutError(f"the store, or another rank, has not answered in {limit_s:.3g} s")
        if check is not None:
            check()
    # No frame of the error may refer to the error: its other frames refer to process groups, which
    # would stay connected.
    result, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error
