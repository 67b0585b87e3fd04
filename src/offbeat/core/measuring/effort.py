"""Effort of the measurements before a plan: how long they take, and how much they repeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Seconds and repetitions of the measurements of `prepare`.

    Attributes:
        links_s: seconds for all links. If an all-reduce of the model takes long, they get more.
        series: messages of each size of a series on one link.
        load: messages back to back on each of two links that carry messages at the same time.
        volleys: volleys of each size whose processor time is measured.
        volley: messages of such a volley.
        codec_numbers: numbers in the large message that is encoded and decoded.
        codec_repeats: repetitions of a small and of a large encoded message.
        codec_messages: messages between ranks that measure the waits of an encoded message.
        codec_rest_s: pause before each of them in seconds.
    """

    links_s: float = 4.0
    series: int = 3
    load: int = 6
    volleys: int = 3
    volley: int = 3
    codec_numbers: int = 1 << 18
    codec_repeats: tuple[int, int] = (25, 5)
    codec_messages: int = 9
    codec_rest_s: float = 0.004


THOROUGH = Effort()
QUICK = Effort(
    links_s=0.5, series=1, load=2, volleys=1, volley=1, codec_numbers=1 << 14,
    codec_repeats=(1, 1), codec_messages=3, codec_rest_s=0.0,
)  # fmt: skip
_used = THOROUGH


def current() -> Effort:
    """Return the effort of the measurements in this process."""
    return _used


def use(effort: Effort) -> None:
    """Set the effort of all later measurements in this process."""
    global _used
    _used = effort
