"""How much a shaper lets through at once, how much waits before it, and what TCP hands it."""

_MIN_BURST_BYTES = 16 * 1024
_BURST_S = 0.002
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024
_MOST_SEGMENTS_BYTES = 65536  # that TCP hands over at once where nothing limits it


def burst_bytes(rate_bps: int) -> int:
    """Bytes that a shaper lets through at once: 2 ms of the rate, at least 16 KiB.

    With 4 KiB an all-reduce of 64 KB at 100 Mbit/s took 9.1 ms instead of 7.9; with 64 KiB from 3.7
    to 23 ms, as the bucket happened to be full or not.
    """
    return max(int(rate_bps / 8 * _BURST_S), _MIN_BURST_BYTES)


def queue_bytes(rate_bps: int) -> int:
    """Bytes that wait before a shaper drops: 50 ms of the rate, at least 128 KiB."""
    return burst_bytes(rate_bps) + max(int(rate_bps / 8 * _QUEUE_S), _MIN_QUEUE_BYTES)


def segments_bytes(rate_bps: int | None) -> int:
    """Bytes that TCP may hand over at once: no more than a burst, as a shaper cuts what is larger
    into single packets.

    Single packets keep processors busy, and several processors deliver them out of order, which
    TCP takes for loss. A tenth of the burst is for the headers, which the shaper counts as well.
    """
    if rate_bps is None:
        return _MOST_SEGMENTS_BYTES
    return min(burst_bytes(rate_bps) * 9 // 10, _MOST_SEGMENTS_BYTES)
