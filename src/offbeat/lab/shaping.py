"""How much a shaper lets through at once, how much waits before it, and what TCP hands it."""

_BURST_S = 0.002
_MIN_BURST_BYTES = 2 * 1514  # full frames
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024
_SINGLE_UP_TO_BPS = 200_000_000
_MOST_SEGMENTS_BYTES = 65536  # that TCP hands over at once where nothing limits it


def burst_bytes(rate_bps: int) -> int:
    """Bytes that a shaper lets through at once: 2 ms of the rate, at least two frames.

    With 64 KiB an all-reduce of 64 KB at 100 Mbit/s took from 3.7 to 23 ms, as the bucket happened
    to be full or not. With 16 KiB at 10 Mbit/s, which are 13 ms, averages that pause in between
    were up to 28 % faster than the rate allows.
    """
    return max(int(rate_bps / 8 * _BURST_S), _MIN_BURST_BYTES)


def queue_bytes(rate_bps: int) -> int:
    """Bytes that wait before a shaper drops: 50 ms of the rate, at least 128 KiB."""
    return burst_bytes(rate_bps) + max(int(rate_bps / 8 * _QUEUE_S), _MIN_QUEUE_BYTES)


def segments_bytes(rate_bps: int | None) -> int:
    """Bytes that TCP may hand over at once such that no shaper cuts them into single packets.

    A tenth of the burst is for the headers, which the shaper counts as well.
    """
    if rate_bps is None:
        return _MOST_SEGMENTS_BYTES
    return min(burst_bytes(rate_bps) * 9 // 10, _MOST_SEGMENTS_BYTES)


def bridged_segments_bytes(rate_bps: int | None) -> int:
    """The same on a bridge, where nothing is limited up to 200 Mbit/s.

    Single packets are as on a real link, with an acknowledgement for every second one (93.6 % of
    the rate is payload when all hosts send). Faster, they take more time than processors have.
    Several processors then deliver them out of order, which TCP takes for loss.
    """
    cut = rate_bps is not None and rate_bps <= _SINGLE_UP_TO_BPS
    return _MOST_SEGMENTS_BYTES if cut else segments_bytes(rate_bps)
