"""Rendezvous: a part of the store that nobody has written to before.

torchrun's store outlives the processes that it restarts. There they would find the addresses of
those that have died: torch 2.13 does, with `--standalone` and with one static node. How often a
process was restarted cannot tell attempts apart, as the agents of several hosts count for
themselves. So each process shows a number that it has drawn, and rank 0 answers that one.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

LOOK_EVERY_S = 0.02
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def may_be_stale() -> bool:
    """Whether processes before this one may have used the same store."""
    return RESTARTS_VARIABLE in os.environ


def fresh(store: Any, rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """A part of the store for these processes alone; every rank must call it. TimeoutError naming
    the ranks that did not."""
    until_s = time.monotonic() + timeout_s
    drawn = secrets.token_hex(8)
    token = drawn
    if rank == 0:
        _welcome(store, token, set(range(1, world_size)), until_s)
    else:
        store.set(f"offbeat/here/{rank}", drawn)
        answer = f"offbeat/welcome/{drawn}"
        while not store.check([answer]):
            if time.monotonic() > until_s:
                raise TimeoutError("rank 0 has not come")
            time.sleep(LOOK_EVERY_S)
        token = store.get(answer).decode()
        store.set(f"offbeat/in/{token}/{rank}", "")
    return PrefixStore(f"offbeat/{token}", store)


def _welcome(store: Any, token: str, missing: set[int], until_s: float) -> None:
    """Tell every rank the token, until all of them have said that they know it."""
    while missing:
        for rank in [*missing]:
            if store.check([f"offbeat/in/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([here := f"offbeat/here/{rank}"]):
                store.set(f"offbeat/welcome/{store.get(here).decode()}", token)
        if missing and time.monotonic() > until_s:
            names = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"rank {names} {'has' if len(missing) == 1 else 'have'} not come")
        time.sleep(LOOK_EVERY_S)
