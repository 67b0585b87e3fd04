"""Interface of agreements between all ranks, and the error of values that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Agreement(Protocol):
    """Exchange of small values between all ranks, such as `Control` and `StoreAgreement`.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of waits in seconds.
        hosts: host name of each rank.
    """

    rank: int
    world_size: int
    timeout_s: float

    @property
    def hosts(self) -> Sequence[str]: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        ...

    def agree(self, what: str, value: Any, remedy: str) -> None:
        """Require equal values on all ranks."""
        ...


def require_equal(what: str, values: Sequence[Any], remedy: str) -> None:
    """Raise ValueError unless the values of all ranks are equal.

    Args:
        what: name of the value in the error.
        values: values by rank.
        remedy: last part of the error.
    """
    if all(value == values[0] for value in values):
        return
    odd = next(rank for rank, value in enumerate(values) if value != values[0])
    same = [rank for rank, value in enumerate(values) if value == values[odd]]
    raise ValueError(
        f"{what} must be the same on all ranks: rank 0 has {values[0]}, "
        f"rank {', '.join(map(str, same))} {'has' if len(same) == 1 else 'have'} "
        f"{values[odd]}; {remedy}"
    )
