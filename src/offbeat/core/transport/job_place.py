"""Rank of this process in its job, and numbers of ranks and of servers, from the environment."""

from __future__ import annotations

import os

SERVERS_VARIABLE = "OFFBEAT_SERVERS"  # number of servers; the last ranks serve
# Rank and number of ranks including servers. RANK and WORLD_SIZE may count workers only.
RANK_VARIABLE = "OFFBEAT_RANK"
WORLD_SIZE_VARIABLE = "OFFBEAT_WORLD_SIZE"


def current_servers() -> int:
    """Return the number of servers, which are the last ranks. Raise ValueError if OFFBEAT_SERVERS
    is not a number."""
    text = os.environ.get(SERVERS_VARIABLE) or "0"
    if not text.isdecimal():
        raise ValueError(f"{SERVERS_VARIABLE} ({text!r}) must be a number of ranks, 0 or more")
    return int(text)


def current_place() -> tuple[int, int]:
    """Return the rank and the number of ranks, including servers; (0, 1) without a launcher.

    A launcher that starts servers sets RANK and WORLD_SIZE to count workers only, because scripts
    split their data by these variables.
    """
    rank = os.environ.get(RANK_VARIABLE) or os.environ.get("RANK", "0")
    return int(rank), int(os.environ.get(WORLD_SIZE_VARIABLE) or os.environ.get("WORLD_SIZE", "1"))
