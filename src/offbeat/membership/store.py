"""Store of torch.distributed whose keys are in the membership service.

Process groups of an epoch meet through it. The store outlives each member, so that the others can
meet again after a death.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from offbeat.membership.client import Rendezvous


class RendezvousStore(dist.Store):
    """Store whose keys are those of a rendezvous.

    Keep a reference to the store while process groups use it, because torch keeps none to an object
    of Python.

    Args:
        rendezvous: keys of an epoch.
        timeout_s: longest wait for a key in seconds, for calls without a timeout of their own.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float):
        super().__init__()
        self._rendezvous = rendezvous
        self.set_timeout(timedelta(seconds=timeout_s))

    def clone(self) -> RendezvousStore:
        """Return this store, which any thread may use."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._rendezvous.set(key, _to_bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as it is set.

        Raises:
            torch.distributed.DistStoreError: the key was not set within the timeout.
            EpochReplacedError: the key is not set, and a later epoch has been written.
        """
        try:
            return self._rendezvous.get(key, self._timeout_s())
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are set.

        Raises:
            torch.distributed.DistStoreError: a key was not set within the timeout.
            EpochReplacedError: a key is not set, and a later epoch has been written.
        """
        limit_s = self._timeout_s() if timeout is None else timeout.total_seconds()
        try:
            self._rendezvous.wait(keys, limit_s)
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def _timeout_s(self) -> float:
        limit: timedelta = self.timeout  # pyright: ignore[reportAttributeAccessIssue]  # no stub
        return limit.total_seconds()

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._rendezvous.check(keys)

    def add(self, key: str, value: int) -> int:
        """Add a number to that of a key, and return the sum."""
        return self._rendezvous.add(key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value, and return its value."""
        expected, desired = _to_bytes(expected_value), _to_bytes(desired_value)
        return self._rendezvous.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return whether it was set."""
        return self._rendezvous.delete(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._rendezvous.count()

    def has_extended_api(self) -> bool:
        """Whether the store appends to values, and sets and reads several keys in one request."""
        return False


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
