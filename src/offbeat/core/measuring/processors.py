"""Number of processors, and their time spent on interrupts."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")


def processors() -> int:
    """Return the number of processors that this process may use."""
    return processor_bits().bit_count()


def processor_bits() -> int:
    """Return the processors that this process may use, as one bit each."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << number for number in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1


def kernel_s() -> float:
    """Return the seconds that all processors have spent on interrupts, such as those of packets.

    Return 0 if `/proc/stat` cannot be read.
    """
    try:
        fields = STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[6:8])) / os.sysconf("SC_CLK_TCK")
