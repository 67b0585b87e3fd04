"""Rank of this worker, and number of workers."""

from __future__ import annotations

import torch.distributed as dist

from offbeat.core.transport.job_place import current_place, current_servers
from offbeat.data.numbers import require_count


def require_no_servers(what: str) -> None:
    """Raise ValueError if the job has servers, which send no messages of data."""
    if servers := current_servers():
        raise ValueError(
            f"servers ({servers}) must be 0 with {what}, which exchanges messages between all "
            "ranks; leave it out, or choose a strategy without servers"
        )


def place(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and number of workers.

    The source is the first of: the arguments, `torch.distributed`, the variables of a launcher. If
    there is none of these, rank 0 of one worker is returned. Servers, which are the last ranks, do
    not count; a script also runs on them until `prepare`. Raise ValueError if the values are
    invalid.
    """
    is_open = dist.is_available() and dist.is_initialized()
    found = (dist.get_rank(), dist.get_world_size()) if is_open else current_place()
    workers = max(found[1] - current_servers(), 1)
    found = found[0] % workers, workers
    rank = found[0] if rank is None else rank
    world_size = found[1] if world_size is None else world_size
    require_count("world_size", world_size)
    require_count("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(
            f"rank ({rank}) must be below world_size ({world_size}); give both or neither"
        )
    return rank, world_size
