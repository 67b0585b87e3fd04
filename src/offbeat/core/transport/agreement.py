"""Agreement of all ranks: its interface, the store as its means before the first process group, and
the comparison of versions."""

from __future__ import annotations

import socket
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from offbeat.core.transport import packed
from offbeat.core.transport.rendezvous import missing_keys

STAYS_S = 2.0  # longest time for which rank 0 keeps its store open after an error
LOOK_EVERY_S = 0.02  # seconds between two looks at the store


class Agreement(ABC):
    """Exchange of small values between all ranks.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of waits in seconds.
        hosts: host name of each rank; empty before all ranks have met.
    """

    rank: int
    world_size: int
    timeout_s: float
    hosts: Sequence[str] = ()

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""

    def agree(self, what: str, value: Any, remedy: str) -> None:
        """Require equal values on all ranks.

        Args:
            what: name of the value in the error.
            value: value of this rank.
            remedy: last part of the error.

        Raises:
            ValueError: on every rank, if values differ; names the ranks that differ.
        """
        values = self.gather(value)
        if all(value == values[0] for value in values):
            return
        odd = next(rank for rank, value in enumerate(values) if value != values[0])
        same = [rank for rank, value in enumerate(values) if value == values[odd]]
        raise ValueError(
            f"{what} must be the same on all ranks: rank 0 has {values[0]}, "
            f"rank {', '.join(map(str, same))} {'has' if len(same) == 1 else 'have'} "
            f"{values[odd]}; {remedy}"
        )


class StoreAgreement(Agreement):
    """Agreement by the job's store, for decisions before the first process group.

    Args:
        store: part of the store for this object alone.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of waits in seconds.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float):
        self._store, self._count = store, 0
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s

    def __enter__(self) -> StoreAgreement:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, keep the store of rank 0 open until all ranks have read the values."""
        until_s = time.monotonic() + STAYS_S
        while kind is not None and self.rank == 0 and time.monotonic() < until_s:
            if self._store.add(f"{self._count}/read", 0) >= self.world_size:
                return
            time.sleep(LOOK_EVERY_S)

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
                "it has failed, or has another version of offbeat. See its log, and install one "
                "version"
            ) from error
        if self.rank == 0:
            self._store.set(joined, packed.join(self._store.multi_get(keys)))
        data = self._store.get(joined)
        self._store.add(f"{prefix}read", 1)
        return packed.split(data)


def compare_versions(ranks: Agreement, offbeat: str, torch: str) -> list[str]:
    """Return the host of each rank, after a comparison of the versions of all ranks.

    A difference between minor versions of torch is a warning of rank 0.

    Args:
        ranks: exchange of values.
        offbeat: version of offbeat of this rank.
        torch: version of torch of this rank.

    Raises:
        ValueError: on every rank, if ranks have different versions of offbeat; names the ranks.
    """
    everyone = ranks.gather([socket.gethostname(), offbeat, torch])
    for place, what, parts in ((1, "offbeat", None), (2, "torch", 2)):
        versions = [one[place].split(".")[:parts] for one in everyone]
        odd = [
            f"rank {rank} ({host}) has {what} {numbers[place - 1]}"
            for rank, (host, *numbers) in enumerate(everyone)
            if versions[rank] != versions[0]
        ]
        if not odd:
            continue
        words = f"{', '.join(odd)}, rank 0 has {everyone[0][place]}; install one version"
        if what == "offbeat":
            raise ValueError(words)
        if ranks.rank == 0:
            warnings.warn(words, stacklevel=2)
    return [host for host, *_ in everyone]
