"""Interval: sums over consecutive iterations of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

CAUSES = ("slow_rank", "slow_compute", "slow_link", "slow_script", "unknown")  # of notices
PER_OCTAVE = 8  # bins of the histogram per doubling of the seconds


class LinkSums(NamedTuple):
    """Sums over the messages of one link.

    Attributes:
        messages: number of messages.
        bytes: bytes that this rank has sent.
        seconds: sum of the seconds of messages from their start to their arrival.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class LossSums(NamedTuple):
    """Losses of the iterations of an interval.

    Attributes:
        n: number of finite losses.
        mean: mean of these losses; 0 if there is none.
        last: last of these losses; 0 if there is none.
        nonfinite: number of losses that were NaN or infinite.
    """

    n: int
    mean: float
    last: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums over consecutive iterations of one rank.

    Attributes:
        rank: rank.
        first: number of the first iteration.
        n: number of iterations.
        t: end of the interval in seconds since 1970, by this rank's clock.
        s_sum: seconds of all iterations.
        s_min: seconds of the fastest iteration.
        s_max: seconds of the slowest iteration.
        hist: number of iterations by `bin_of` their seconds.
        own_s: seconds in forward, backward and updates.
        wait_s: seconds in which compute waited for messages.
        script_s: seconds between the end of an iteration and the next forward.
        links: by link, sums over its messages.
        loss: losses; None if the script called `backward` on no scalar.
        updates: number of iterations that applied an update.
        rss_bytes: memory of the process at the end; None if unknown.
        device_bytes: allocated memory of the accelerator at the end; None without one.
    """

    rank: int
    first: int
    n: int
    t: float
    s_sum: float
    s_min: float
    s_max: float
    hist: Mapping[int, int]
    own_s: float
    wait_s: float
    script_s: float
    links: Mapping[str, LinkSums] = field(default_factory=dict)
    loss: LossSums | None = None
    updates: int = 0
    rss_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return self.s_sum / self.n

    @property
    def stop(self) -> int:
        """Number of the first iteration after the interval."""
        return self.first + self.n

    @property
    def message_s(self) -> float:
        """Seconds of all messages per iteration."""
        return sum(link.seconds for link in self.links.values()) / self.n

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a record's line. Seconds are rounded to microseconds."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("t", "s_sum", "s_min", "s_max", "own_s", "wait_s", "script_s"):
            data[name] = round(data[name], 6)
        data["links"] = {name: [m, b, round(s, 6)] for name, (m, b, s) in self.links.items()}
        if self.loss is not None:
            n, mean, last, nonfinite = self.loss
            data["loss"] = [n, _round_loss(mean), _round_loss(last), nonfinite]
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interval:
        """Return the interval of a record's line. Unknown fields are ignored.

        Raises:
            KeyError: a field is missing.
            TypeError, ValueError: a field has another type.
        """
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        known["hist"] = {int(b): int(n) for b, n in data["hist"].items()}
        known["links"] = {name: LinkSums(*sums) for name, sums in data.get("links", {}).items()}
        known["loss"] = LossSums(*data["loss"]) if data.get("loss") else None
        missing = {"rank", "first", "n", "t", "s_sum", "s_min", "s_max", "own_s"} - set(known)
        if missing:
            raise KeyError(min(missing))
        return cls(**known)


def bin_of(seconds: float) -> int:
    """Return the bin of the histogram. Bin b holds [2^(b/8), 2^((b+1)/8)) seconds."""
    return math.floor(PER_OCTAVE * math.log2(max(seconds, 1e-9)))


def quantile(hist: Mapping[int, int], share: float) -> float:
    """Return a quantile of seconds from a histogram, exact to 4.5 %: the middle of its bin.

    Raises:
        ValueError: the histogram is empty.
    """
    total, below = sum(hist.values()), 0
    if not total:
        raise ValueError(f"hist ({dict(hist)}) must hold at least one iteration")
    *others, last = sorted(hist)
    for b in others:
        below += hist[b]
        if below >= share * total:
            return 2.0 ** ((b + 0.5) / PER_OCTAVE)
    return 2.0 ** ((last + 0.5) / PER_OCTAVE)


def combine(intervals: Sequence[Interval]) -> Interval:
    """Return the sums over intervals of one rank, in the order of their iterations.

    Raises:
        ValueError: there is no interval.
    """
    if not intervals:
        raise ValueError("intervals ([]) must hold at least one interval")
    last = intervals[-1]
    hist: dict[int, int] = {}
    links: dict[str, LinkSums] = {}
    for interval in intervals:
        for b, n in interval.hist.items():
            hist[b] = hist.get(b, 0) + n
        for name, sums in interval.links.items():
            before = links.get(name, LinkSums())
            links[name] = LinkSums(
                before.messages + sums.messages,
                before.bytes + sums.bytes,
                before.seconds + sums.seconds,
            )
    return replace(
        last,
        first=intervals[0].first,
        s_min=min(interval.s_min for interval in intervals),
        s_max=max(interval.s_max for interval in intervals),
        hist=hist,
        links=links,
        loss=_combine_losses([i.loss for i in intervals if i.loss is not None]),
        **{
            name: sum(getattr(interval, name) for interval in intervals)
            for name in ("n", "s_sum", "own_s", "wait_s", "script_s", "updates")
        },
    )


def _combine_losses(losses: Sequence[LossSums]) -> LossSums | None:
    if not losses:
        return None
    n = sum(loss.n for loss in losses)
    finite = [loss for loss in losses if loss.n]
    mean = sum(loss.n * loss.mean for loss in finite) / n if n else 0.0
    last = finite[-1].last if finite else 0.0
    return LossSums(n, mean, last, sum(loss.nonfinite for loss in losses))


def recent(intervals: Sequence[Interval], seconds: float) -> Iterator[Interval]:
    """Yield the last intervals, newest first, until they cover `seconds`."""
    covered_s = 0.0
    for interval in reversed(intervals):
        if covered_s >= seconds:
            return
        covered_s += interval.s_sum
        yield interval


def _round_loss(loss: float) -> float:
    """Return a loss in the precision of float32."""
    return float(f"{loss:.9g}")
