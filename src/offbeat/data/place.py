"""This worker's place among the others: its rank and how many there are."""

from __future__ import annotations

import os

import torch.distributed as dist

from offbeat.data.numbers import require_count


def place(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Rank and world size: what is given, else what `torch.distributed` says, else what a launcher
    put into RANK and WORLD_SIZE, else a worker alone. ValueError if they cannot be."""
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
