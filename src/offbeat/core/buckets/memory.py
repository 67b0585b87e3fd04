"""Return of freed memory from the C library to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return memory that glibc keeps after it was freed to the operating system.

    Later allocations have other sizes and would not reuse that memory.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
