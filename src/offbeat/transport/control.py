"""Control: small messages beside the links - agreement between ranks, and who is behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.transport.link import THREAD_PREFIX

PUBLISH_EVERY_S = 1.0
STORE_ANSWERS_S = 3.0
TOGETHER_S = 1.0  # ranks that wait for the same one give up within this time
STORE_STAYS_S = 15.0  # ranks fail one after the other, each when it sees the next one leave
STORE_IS_SILENT = "The store of rank 0 does not answer: it has failed itself, or its host is gone."


class Control:
    """A group of its own for agreement, so that bulk traffic never holds it up, and a store
    where every rank leaves its progress."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        try:
            self.group = new_group("gloo", timeout_s)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {timeout_s:g} s for all {self.world_size} ranks to call "
                f"offbeat.prepare: {error}. See the logs of the others: one may have failed, or "
                "have ended, as a server does when all workers have closed their model"
            ) from error
        store = distributed_c10d._get_default_store()
        self._store = PrefixStore("offbeat", store)
        self._published_s = 0.0
        self.hosts: list[str] = self.gather(socket.gethostname())

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank. RuntimeError naming who is missing on timeout."""
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(f"ranks could not agree: {error}. {self.behind()}") from error
        return values

    def same(self, numbers: Sequence[int]) -> bool:
        """Whether every rank has these numbers (of at most 62 bits): one small collective."""
        mine = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64)
        largest = mine.clone()
        try:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(f"ranks could not agree: {error}. {self.behind()}") from error
        # Equal on every rank or on none: largest and smallest coincide, or they do not.
        return all(int(a) == -int(b) for a, b in zip(*largest.chunk(2), strict=True))

    def agree(self, what: str, value: Any, remedy: str) -> None:
        """ValueError on every rank, naming the ranks that differ, unless all values are equal."""
        values = self.gather(value)
        if all(v == values[0] for v in values):
            return
        odd = next(rank for rank, v in enumerate(values) if v != values[0])
        same = [rank for rank, v in enumerate(values) if v == values[odd]]
        raise ValueError(
            f"{what} must be the same on all ranks: rank 0 has {values[0]}, "
            f"rank {', '.join(map(str, same))} {'has' if len(same) == 1 else 'have'} "
            f"{values[odd]}; {remedy}"
        )

    def publish(self, iteration: int) -> None:
        """Leave this rank's progress where others can read it, at most once per second."""
        now = time.monotonic()
        if now - self._published_s >= PUBLISH_EVERY_S and self.world_size > 1:
            self._published_s = now
            self._leave_word(iteration)

    def behind(self, waiting_in: int | None = None) -> str:
        """Words on who is behind or silent, from what every rank published last. A rank that gave
        up `waiting_in` an iteration says so first, as what it published may be a second old.

        The store lives in rank 0; while that is stopped, asking it never returns, hence the
        thread. Its name says that it may be stuck in a call that nothing can interrupt.
        """
        words: list[str] = []
        name = f"{THREAD_PREFIX}store"
        asking = threading.Thread(
            target=lambda: words.append(self._last_heard(waiting_in)), name=name, daemon=True
        )
        asking.start()
        asking.join(STORE_ANSWERS_S)
        return words[0] if words else STORE_IS_SILENT

    def culprit(self, waited_for: int) -> int:
        """The rank that keeps this one waiting in the end: that which it `waited_for`, or whom
        that one has said to wait for, and so on. To be asked after a failed wait, by each rank."""
        found: list[int] = []
        asking = threading.Thread(
            target=lambda: found.append(self._last_of_chain(waited_for)),
            name=f"{THREAD_PREFIX}store",
            daemon=True,
        )
        asking.start()
        asking.join(TOGETHER_S + STORE_ANSWERS_S)
        if found and self.rank == 0:
            self._keep_store(found[0])
        return found[0] if found else 0  # whose store it is

    def _keep_store(self, culprit: int) -> None:
        """Stay until all others have asked: the store goes with rank 0."""
        end_s = time.monotonic() + STORE_STAYS_S
        others = [f"asked/{rank}" for rank in range(1, self.world_size) if rank != culprit]
        while time.monotonic() < end_s and not self._store.check(others):
            time.sleep(TOGETHER_S / 4)

    def _last_of_chain(self, rank: int) -> int:
        try:
            self._store.set(f"waits/{self.rank}", str(rank))
            time.sleep(TOGETHER_S)
            for _ in range(self.world_size):
                if not self._store.check([f"waits/{rank}"]):
                    break
                rank = int(self._store.get(f"waits/{rank}"))
            self._store.set(f"asked/{self.rank}", "")
        except RuntimeError:
            return 0
        return rank

    def _leave_word(self, iteration: int) -> None:
        self._store.set(f"progress/{self.rank}", json.dumps([iteration, time.time()]))

    def _last_heard(self, waiting_in: int | None) -> str:
        try:
            if waiting_in is not None:
                self._leave_word(waiting_in)
                time.sleep(TOGETHER_S)
            seen = [self._progress(rank) for rank in range(self.world_size)]
        except RuntimeError:
            return STORE_IS_SILENT
        words = []
        for rank, progress in enumerate(seen):
            host = self.hosts[rank] if hasattr(self, "hosts") else "?"
            if progress is None:
                words.append(f"rank {rank} ({host}): no iteration yet")
            else:
                age = time.time() - progress[1]
                words.append(f"rank {rank} ({host}): iteration {progress[0]}, {age:.0f} s ago")
        return "Last heard of: " + "; ".join(words) + "."

    def _progress(self, rank: int) -> list[float] | None:
        key = f"progress/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def new_group(
    backend: str, timeout_s: float, parts: Sequence[Sequence[int]] = ()
) -> dist.ProcessGroup:
    """A process group over all ranks, or over this rank's part of them."""
    mine, timeout = None, timedelta(seconds=timeout_s)
    for part in parts or [range(dist.get_world_size())]:  # every rank must make every group
        group = dist.new_group(list(part), backend=backend, timeout=timeout)
        mine = group if dist.get_rank() in part else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine
