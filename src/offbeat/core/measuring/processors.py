"""Processors that this process may use."""

from __future__ import annotations

import os


def processors() -> int:
    """Return the number of processors that this process may use."""
    return processor_bits().bit_count()


def processor_bits() -> int:
    """Return the processors that this process may use, as one bit each."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << number for number in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1
