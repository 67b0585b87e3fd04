"""Rank of this worker, and number of workers."""

from __future__ import annotations

import os

import torch.distributed as dist

from offbeat.data.numbers import require_count


def place(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world size.

    The source is the first of: the arguments, `torch.distributed`, the variables RANK and
    WORLD_SIZE of a launcher. If there is none of these, rank 0 of one worker is returned. Raise
    ValueError if the values are invalid.
    """
    if dist.is_available() and dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
    else:
        found = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank = found[0] if rank is None else rank
    world_size = found[1] if world_size is None else world_size
    require_count("world_size", world_size)
    require_count("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(
            f"rank ({rank}) must be below world_size ({world_size}); give both or neither"
        )
    return rank, world_size
