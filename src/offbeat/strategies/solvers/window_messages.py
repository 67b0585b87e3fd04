"""Gradient messages that fit a window: consecutive buckets fused, large buckets cut into slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.plan import Payload
from offbeat.core.profile import Profile

MOST_PARTS = 256  # largest number of slices of a bucket; smaller ones take little but latency
ROUNDING = 1e-12
# Pairs of shares of the largest message that fits: size up to which consecutive buckets are fused,
# and size of slices. Smaller messages fill windows better; larger messages have less latency.
LEVELS = ((1.0, 1.0), (0.25, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 0.25))


class NoWindowError(ValueError):
    """Error if the smallest slice of some bucket does not fit into backward."""


class Messages:
    """Divisions of one iteration's gradients into messages of several sizes.

    The messages are in the order of ready times. Each message fits into the window on each link
    while all other links are busy.

    Args:
        profile: profile of model and links.
        links: names of the links.
        most_elements: largest number of elements in a message, except for a slice of 1/256 that
            holds more.
    """

    def __init__(self, profile: Profile, links: Sequence[str], most_elements: int) -> None:
        self._profile = profile
        self._sizes_bytes = [bucket.size_bytes for bucket in profile.buckets]
        self._most_bytes = most_elements * ELEMENT_BYTES
        self._links = list(links)
        self._speeds = [
            profile.speed(link, [other for other in links if other != link]) for link in links
        ]

    def weights_s(self, payloads: Sequence[Payload]) -> list[list[float]]:
        """Return `[link][message]`: the seconds of each message while all other links are busy."""
        return [
            [self._profile.message_s(payload, link) / speed for payload in payloads]
            for link, speed in zip(self._links, self._speeds, strict=True)
        ]

    def variants(self, forward_s: float, backward_s: float) -> Iterator[list[Payload]]:
        """Yield lists of messages that fit into the shorter window, the largest messages first.

        If there are none, yield lists of messages that fit into backward.

        Args:
            forward_s: seconds of forward.
            backward_s: seconds of backward.

        Raises:
            NoWindowError: the smallest slice of some bucket does not fit.
        """
        for limit_s in (min(forward_s, backward_s), backward_s):
            found: list[list[Payload]] = []
            for level in LEVELS:
                payloads = self.cut(limit_s, *level)
                if payloads is not None and payloads not in found:
                    found.append(payloads)
                    yield payloads
            if found:
                return
        raise NoWindowError(self._too_large(backward_s))

    def cut(self, limit_s: float, fused: float, sliced: float) -> list[Payload] | None:
        """Return messages that take at most `limit_s` on each link, or None if a bucket does not.

        Args:
            limit_s: longest time of a message.
            fused: share of the limits of bytes and time up to which consecutive buckets are fused.
            sliced: approximate share of `limit_s` that a slice of a larger bucket takes. The bucket
                is cut into the smallest possible number of equal slices.
        """
        result: list[Payload] = []
        start = 0
        while start < len(self._sizes_bytes):
            stop = self._fusion_end(start, limit_s, fused) if fused else start + 1
            parts = 1 if stop > start + 1 else self._parts(start, limit_s, sliced)
            if parts is None:
                return None
            run = range(start, stop)
            result += [Payload("grad", run, part, parts) for part in range(parts)]
            start = stop
        return result

    def _fusion_end(self, start: int, limit_s: float, fused: float) -> int:
        """Return the end of the longest run of buckets from `start` on within the share `fused`.

        The limits are those of bytes and time. The run has at least one bucket.
        """

        def exceeds_limits(count: int) -> bool:
            run = range(start, start + count)
            too_large = sum(self._sizes_bytes[start : run.stop]) > fused * self._most_bytes
            return too_large or self._slowest_s(run) > fused * limit_s

        return start + max(1, _least(exceeds_limits, 1, len(self._sizes_bytes) - start + 1) - 1)

    def _parts(self, bucket: int, limit_s: float, sliced: float) -> int | None:
        """Return the number of slices with which a bucket fits on every link, or None."""
        run = range(bucket, bucket + 1)
        most_s = limit_s * (1 + ROUNDING)
        parts = max(1, -(-self._sizes_bytes[bucket] // self._most_bytes))
        if 0 < limit_s < math.inf:
            shares = self._slowest_s(run) / (sliced * limit_s)
            parts = max(parts, math.ceil(min(shares, MOST_PARTS) * (1 - ROUNDING)))
        fits = _least(
            lambda n: self._slowest_s(run, n) <= most_s, min(parts, MOST_PARTS), MOST_PARTS + 1
        )
        return fits if fits <= MOST_PARTS else None

    def _slowest_s(self, run: range, parts: int = 1) -> float:
        """Return the seconds of a slice of a run of buckets on the slowest link."""
        return max(
            self._profile.message_s(Payload("grad", run, 0, parts), link) / speed
            for link, speed in zip(self._links, self._speeds, strict=True)
        )

    def _too_large(self, backward_s: float) -> str:
        """Return the error message for the first bucket that does not fit into backward."""
        buckets = range(len(self._sizes_bytes))
        bucket = next(i for i in buckets if self._parts(i, backward_s, 1.0) is None)
        run = range(bucket, bucket + 1)
        whole_s, slice_s, link = max(
            (
                self._profile.message_s(Payload("grad", run), link) / speed,
                self._profile.message_s(Payload("grad", run, 0, MOST_PARTS), link) / speed,
                link,
            )
            for link, speed in zip(self._links, self._speeds, strict=True)
        )
        return (
            f"bucket {self._profile.buckets[bucket].name!r} takes {whole_s:.4g} s on link {link!r} "
            f"and a slice of 1/{MOST_PARTS} still {slice_s:.4g} s, which does not fit into "
            f"backward ({backward_s:.4g} s)"
        )


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number in [low, high) for which a monotone condition holds, else `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
