"""Comparison of the versions that ranks have installed, before they exchange other values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from offbeat.core.transport.rendezvous import missing_keys

VERSIONS, RESULT = "versions", "result"  # keys in the store; the first is followed by the rank


def publish_versions(store: Any, rank: int, host: str, offbeat: str, torch: str) -> None:
    """Store the versions of this rank. Each rank calls it before all ranks meet."""
    store.set(f"{VERSIONS}/{rank}", json.dumps([host, offbeat, torch]))


def compare_versions(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Compare the versions of all ranks after they have met.

    Rank 0 reads all versions and stores the result, so that the traffic grows with the number of
    ranks, not with its square. A difference between minor versions of torch is a warning of rank 0.

    Raises:
        ValueError: on every rank, if ranks have different versions of offbeat; names the ranks.
        RuntimeError: rank 0 has not stored the result within `timeout_s`.
    """
    if rank == 0:
        keys = [f"{VERSIONS}/{one}" for one in range(world_size)]
        # A version without this comparison stores no key, and a read of a missing key would block.
        missing = {*missing_keys(store, keys)}
        known = [None if key in missing else json.loads(store.get(key)) for key in keys]
        store.set(RESULT, json.dumps(describe_versions(known)[0]))
        require_same_versions(known, rank)
        return
    if not store.check([f"{VERSIONS}/0"]):
        raise ValueError("rank 0 has an earlier version of offbeat; install one version")
    store.wait([RESULT], timedelta(seconds=timeout_s))
    error = json.loads(store.get(RESULT))
    if error is not None:
        raise ValueError(error)


def require_same_versions(known: Sequence[Sequence[str] | None], rank: int) -> None:
    """Compare the versions of all ranks, which each rank has gathered.

    Args:
        known: see `describe_versions`.
        rank: rank of this process. Rank 0 warns if minor versions of torch differ.

    Raises:
        ValueError: ranks have different versions of offbeat; names the ranks.
    """
    error, warning = describe_versions(known)
    if warning is not None and rank == 0:
        warnings.warn(warning, stacklevel=2)
    if error is not None:
        raise ValueError(error)


def describe_versions(known: Sequence[Sequence[str] | None]) -> tuple[str | None, str | None]:
    """Return an error that names ranks with another version of offbeat, and a warning that names
    ranks with another minor version of torch. A part is None if all ranks agree.

    Args:
        known: host, version of offbeat and version of torch of each rank; None for a rank that has
            stored none.
    """
    first = known[0]
    assert first is not None
    odd, other = list[str](), list[str]()
    for rank, one in enumerate(known):
        if one is None:
            odd.append(f"rank {rank} has an earlier version of offbeat")
        elif one[1] != first[1]:
            odd.append(f"rank {rank} ({one[0]}) has offbeat {one[1]}")
        elif one[2].split(".")[:2] != first[2].split(".")[:2]:
            other.append(f"rank {rank} ({one[0]}) has torch {one[2]}")
    error = f"{', '.join(odd)}, rank 0 has {first[1]}; install one version" if odd else None
    if not other:
        return error, None
    return error, f"{', '.join(other)}, rank 0 has {first[2]}; install one version"
