"""Sizes of bursts and queues of a shaper, and of TCP segments."""

_BURST_S = 0.002
_MIN_BURST_BYTES = 2 * 1514  # full frames
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024
_SINGLE_UP_TO_BPS = 200_000_000
_MOST_SEGMENTS_BYTES = 65536  # segment size of TCP without a limit


def burst_bytes(rate_bps: int) -> int:
    """Return the burst of a shaper in bytes: 2 ms at the rate, at least two frames.

    With a burst of 64 KiB, an all-reduce of 64 KB at 100 Mbit/s took from 3.7 to 23 ms, depending
    on the fill level of the bucket. With 16 KiB at 10 Mbit/s (13 ms), averages with pauses in
    between were up to 28 % faster than the rate allows.
    """
    return max(int(rate_bps / 8 * _BURST_S), _MIN_BURST_BYTES)


def queue_bytes(rate_bps: int) -> int:
    """Return the queue of a shaper in bytes: 50 ms at the rate, at least 128 KiB. Further packets
    are dropped."""
    return burst_bytes(rate_bps) + max(int(rate_bps / 8 * _QUEUE_S), _MIN_QUEUE_BYTES)


def segments_bytes(rate_bps: int | None) -> int:
    """Return the largest TCP segment in bytes that no shaper cuts into single packets.

    A tenth of the burst is reserved for headers, which the shaper counts too.
    """
    if rate_bps is None:
        return _MOST_SEGMENTS_BYTES
    return min(burst_bytes(rate_bps) * 9 // 10, _MOST_SEGMENTS_BYTES)


def bridged_segments_bytes(rate_bps: int | None) -> int:
    """Return the largest TCP segment in bytes on a bridge, which is not limited up to 200 Mbit/s.

    Up to this rate the shaper cuts segments into single packets. As on a real link, every second
    packet is acknowledged, and 93.6 % of the rate is payload when all hosts send. At higher rates,
    single packets take more time than the processors have. Several processors would also deliver
    them out of order, which TCP interprets as loss.
    """
    cut = rate_bps is not None and rate_bps <= _SINGLE_UP_TO_BPS
    return _MOST_SEGMENTS_BYTES if cut else segments_bytes(rate_bps)
