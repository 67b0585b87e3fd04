"""Interval and traffic of the heartbeat; imported without torch by predictions."""

from __future__ import annotations

INTERVAL_S = 0.5  # lower bound of `interval_s`
MAX_EXCHANGES_PER_S = 128  # limit of the exchanges of all ranks with the store per second
# Limit of the interval, which precedes the other one. With 8192 ranks, an interval of 64 s would
# detect a failure only after 160 s, when waits of other ranks have ended.
MAX_INTERVAL_S = 8.0
# Bytes of one exchange that the host of the store receives, in TCP segments with their headers: a
# heartbeat with a status of 100 characters, a request for the digest, and an acknowledgement.
RECEIVED_BYTES = 480
SENT_BYTES = 110  # bytes of one exchange that the host of the store sends: the digest


def interval_s(world_size: int) -> float:
    """Return the seconds between two exchanges of a rank with the store."""
    return max(INTERVAL_S, min(world_size / MAX_EXCHANGES_PER_S, MAX_INTERVAL_S))


def traffic_bps(world_size: int) -> float:
    """Return the bit/s that the host of the store receives, the direction with more traffic.

    They are at most 492 kbit/s at up to 1024 ranks, and 480 bit/s per rank above. The host sends at
    most 113 kbit/s and 110 bit/s per rank.
    """
    return 8 * RECEIVED_BYTES * (world_size - 1) / interval_s(world_size)
