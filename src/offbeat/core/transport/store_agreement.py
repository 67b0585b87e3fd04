"""Agreement of all ranks by the job's store, before they have a process group."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from offbeat.core.transport import packed
from offbeat.core.transport.agreement import require_equal
from offbeat.core.transport.rendezvous import missing_keys
from offbeat.core.transport.versions import require_same_versions

STAYS_S = 2.0  # longest time for which rank 0 keeps its store open after an error
LOOK_EVERY_S = 0.02  # seconds between two looks at the store


class StoreAgreement:
    """Agreement by the job's store, for decisions before the first process group.

    Args:
        store: part of the store for this object alone.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of waits in seconds.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of waits in seconds.
        hosts: host name of each rank, known after `compare_versions`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float):
        self._store, self._count = store, 0
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.hosts: list[str] = []

    def __enter__(self) -> StoreAgreement:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, keep the store of rank 0 open until all ranks have read the values."""
        until_s = time.monotonic() + STAYS_S
        while kind is not None and self.rank == 0 and time.monotonic() < until_s:
            if self._store.add(f"{self._count}/read", 0) >= self.world_size:
                return
            time.sleep(LOOK_EVERY_S)

    def compare_versions(self, version: str) -> None:
        """Require the same version of offbeat on all ranks.

        Raises:
            ValueError: on every rank, if versions differ; names the ranks.
        """
        everyone = self.gather([socket.gethostname(), version, ""])
        self.hosts = [host for host, *_ in everyone]
        require_same_versions(everyone, self.rank)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank.

        Args:
            value: value of types that JSON supports, or tuples.

        Raises:
            RuntimeError: names the ranks that have not answered within `timeout_s`.
        """
        self._count += 1
        prefix = f"{self._count}/"
        keys, joined = [f"{prefix}{rank}" for rank in range(self.world_size)], f"{prefix}all"
        self._store.set(keys[self.rank], packed.pack(value))
        # Rank 0 reads all values and stores their summary, so that the traffic of the store grows
        # with the number of ranks, not with its square.
        awaited = [joined] if self.rank else keys
        try:
            self._store.wait(awaited, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [key.removeprefix(prefix) for key in missing_keys(self._store, keys)]
            raise RuntimeError(
                f"rank {', '.join(missing or ['0'])} has not answered within {self.timeout_s:g} s: "
                "it has failed, or has an earlier version of offbeat. See its log, and install one "
                "version"
            ) from error
        if self.rank == 0:
            self._store.set(joined, packed.join(self._store.multi_get(keys)))
        data = self._store.get(joined)
        self._store.add(f"{prefix}read", 1)
        return packed.split(data)

    def agree(self, what: str, value: Any, remedy: str) -> None:
        require_equal(what, self.gather(value), remedy)
