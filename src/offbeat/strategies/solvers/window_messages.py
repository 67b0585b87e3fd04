"""Messages of gradients that fit a window: neighbouring buckets fused, large ones in slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from offbeat.core.plan import Payload
from offbeat.core.profile import Profile

ELEMENT_BYTES = 4
MOST_PARTS = 256  # slices of a bucket; beyond that a message is hardly more than its latency
ROUNDING = 1e-12
# Shares of the largest message that fits: up to which neighbours are fused, into which slices are
# cut. Smaller messages fill windows better, larger ones pay less latency.
LEVELS = ((1.0, 1.0), (0.25, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 0.25))


class NoWindowError(ValueError):
    """Not even the smallest slice of some bucket fits into backward."""


class Messages:
    """The gradients of one iteration as messages of several sizes, in order of readiness.

    A message must fit on each of the links while the others carry messages too. No message holds
    more than `most_elements`, unless a single slice does.
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
        """Seconds of each message on each link while the others carry messages too."""
        return [
            [self._profile.message_s(payload, link) / speed for payload in payloads]
            for link, speed in zip(self._links, self._speeds, strict=True)
        ]

    def variants(self, forward_s: float, backward_s: float) -> Iterator[list[Payload]]:
        """Messages that fit into the smaller window, else into backward, the largest first.

        Raises NoWindowError if some bucket cannot be cut small enough.
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
        """Neighbours fused up to a share `fused` of the limits of bytes and time, larger buckets
        in the fewest equal slices of about a share `sliced` of the time; None if some do not
        fit."""
        result: list[Payload] = []
        start = 0
        while start < len(self._sizes_bytes):
            stop = self._fused(start, limit_s, fused) if fused else start + 1
            parts = 1 if stop > start + 1 else self._parts(start, limit_s, sliced)
            if parts is None:
                return None
            run = range(start, stop)
            result += [Payload("grad", run, part, parts) for part in range(parts)]
            start = stop
        return result

    def _fused(self, start: int, limit_s: float, fused: float) -> int:
        """Where the longest message from a bucket on ends that is within this share of the limits;
        at least one bucket."""

        def over(count: int) -> bool:
            run = range(start, start + count)
            too_large = sum(self._sizes_bytes[start : run.stop]) > fused * self._most_bytes
            return too_large or self._slowest_s(run) > fused * limit_s

        return start + max(1, _least(over, 1, len(self._sizes_bytes) - start + 1) - 1)

    def _parts(self, bucket: int, limit_s: float, sliced: float) -> int | None:
        """In how many slices a bucket fits into the limit on every link; None if in none."""
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
        """Seconds of a slice of a run on the link that takes longest."""
        return max(
            self._profile.message_s(Payload("grad", run, 0, parts), link) / speed
            for link, speed in zip(self._links, self._speeds, strict=True)
        )

    def _too_large(self, backward_s: float) -> str:
        """Which bucket does not even fit into backward."""
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
    """The least number from `low` on, below `high`, that a monotone condition holds for, else
    `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
