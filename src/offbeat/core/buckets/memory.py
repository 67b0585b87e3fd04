"""Return of freed memory from the C library to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return memory to the operating system that glibc keeps after it was freed.

    Later allocations have other sizes and would not reuse that memory.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's function that gives free memory back to the system, or None without it."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
