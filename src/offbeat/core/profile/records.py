"""Records of a profile: facts of a bucket, a link or a codec, and the seconds of a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from offbeat.core.plan import Kind, Verb

Seconds = Any  # a float, or an array of them: one per message
Points = tuple[tuple[int, float], ...]  # (bytes, seconds) of messages, ascending
PAIRED = ("send", "exchange")  # verbs between two ranks
DISTANT_S = 2e-3
"""Seconds of one step of a ring without bytes, a round trip, from which a link is distant."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Measurements of one bucket.

    Attributes:
        name: name of the bucket.
        forward_s: seconds of its forward per iteration.
        backward_s: seconds of its backward per iteration.
        size_bytes: bytes of its gradients, and of its parameters.
        communication_s: link name to the seconds of a message of `size_bytes`. An entry
            replaces the estimate from the link's latency and rate.
        buffer_bytes: bytes of the floating-point buffers that are averaged with the parameters.
        state_bytes: bytes of the optimizer's state.
        tensors: names of its parameters in ready order, then of its buffers. A profile that is
            loaded from a file thus fixes the layout.
    """

    name: str
    forward_s: float
    backward_s: float
    size_bytes: int
    communication_s: Mapping[str, float] = field(default_factory=dict)
    buffer_bytes: int = 0
    state_bytes: int = 0
    tensors: tuple[str, ...] = ()

    def payload_bytes(self, kind: Kind) -> int:
        """Return the bytes of this bucket in a message.

        Args:
            kind: kind of the buffer: "grad", "param" or "state".
        """
        if kind == "grad":
            return self.size_bytes
        return self.size_bytes + self.buffer_bytes if kind == "param" else self.state_bytes

    def with_given_times(self, change: Callable[[str, float], float]) -> Bucket:
        """Return the bucket with other given times of its messages.

        Args:
            change: function of a link's name and the seconds on it; returns the changed seconds.
        """
        given = {link: change(link, seconds) for link, seconds in self.communication_s.items()}
        return replace(self, communication_s=given)


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and rate of one link: an all_reduce of M bytes takes `latency_s + M / bytes_per_s`.

    Attributes:
        name: name of the link.
        latency_s: seconds of an all_reduce of zero bytes, by the fitted line.
        bytes_per_s: payload bytes per second of an all_reduce. Bytes on the wire are more.
        fit_error: mean relative error of the fit; None if the values were not fitted.
        small: measured (bytes, seconds) of small messages, ascending. They take longer than the
            fitted line predicts: with gloo on TCP, up to about 40 KB, a constant time.
        halves: "reduce_scatter" or "all_gather" to (latency_s, bytes_per_s). Without an entry,
            a half takes half of the time of an all_reduce, as it has half of the steps, or if
            `pair_bytes_per_s` is known the time of its own steps.
        cpu_s_per_message: processor seconds that a rank spends to send a message. Compute of
            the rank is delayed by this time; 0 if a device computes.
        cpu_s_per_byte: processor seconds that a rank spends per byte sent; 0 if a device
            computes.
        jitter: relative standard deviation of message times.
        vote_s: seconds of a message of one number per rank; None if not measured.
        small_halves: "reduce_scatter" or "all_gather" to measured (bytes, seconds) of small
            messages.
        asked_rate_bps: smallest rate between two ranks of the measured network, in bit/s; None
            if not known.
        asked_latency_s: largest one-way delay between two ranks of the measured network;
            unknown if the rate is None.
        asked_loss: largest packet loss between two ranks of the measured network; unknown if
            the rate is None.
        connections: number of TCP connections between two ranks in the measured network.
        pause_s: seconds without a message after which the next one takes additional time, because
            TCP has returned to its initial window.
        after_pause: (bytes, additional seconds) of all_reduces after such a pause, ascending; empty
            if there is no additional time. Gossip and servers are predicted without it.
        pair_bytes_per_s: payload bytes per second of a message between two ranks; None: that of a
            step of a ring all_reduce. An all_reduce over a path with delay transfers a part of its
            bytes while it waits for round trips, so `bytes_per_s` exceeds the rate of the network.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    fit_error: float | None = None
    small: tuple[tuple[int, float], ...] = ()
    halves: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cpu_s_per_message: float = 0.0
    cpu_s_per_byte: float = 0.0
    jitter: float = 0.0
    vote_s: float | None = None
    small_halves: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    asked_rate_bps: float | None = None
    asked_latency_s: float = 0.0
    asked_loss: float = 0.0
    connections: int = 1
    pause_s: float = 0.0
    after_pause: tuple[tuple[int, float], ...] = ()
    pair_bytes_per_s: float | None = None

    def with_times(
        self,
        line: Callable[[float, float, float], tuple[float, float]],
        points: Callable[[Points, float], Points],
        **more: Any,
    ) -> Link:
        """Return the link with other times of all_reduces and of their halves.

        Args:
            line: function of a latency, a rate and the share of the message in an all_reduce: 1, or
                0.5 for a half; returns the changed latency and rate.
            points: function of measured points and of that share; returns the changed points.
            more: further fields to change.
        """
        latency_s, bytes_per_s = line(self.latency_s, self.bytes_per_s, 1.0)
        between = self.pair_bytes_per_s
        return replace(
            self,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            pair_bytes_per_s=between and between * bytes_per_s / self.bytes_per_s,
            small=points(self.small, 1.0),
            halves={verb: line(*pair, 0.5) for verb, pair in self.halves.items()},
            small_halves={verb: points(one, 0.5) for verb, one in self.small_halves.items()},
            **more,
        )

    def seconds(
        self,
        latency_s: Seconds,
        transfer_s: Seconds,
        size_bytes: Seconds,
        verb: Verb = "all_reduce",
        ranks: int = 2,
    ) -> Seconds:
        """Return the seconds of one message, or of several as arrays.

        The result is the time of the fitted line, but at least the measured time of that size. A
        send counts as one step of a ring all_reduce, which has 2 (K - 1) steps of one K-th of the
        bytes for K ranks, but at the rate `send_bytes_per_s`. In such a step each rank sends and
        receives, so an exchange takes the time of a send. A broadcast is a tree of sends.

        Args:
            latency_s: latency of an all_reduce of the payload.
            transfer_s: remaining time of an all_reduce of the payload.
            size_bytes: bytes of the payload.
            verb: kind of message.
            ranks: number of ranks of the collective.
        """
        if verb == "broadcast":
            one_s = self.seconds(latency_s, transfer_s, size_bytes, "send", ranks)
            return one_s * _tree_depth(ranks)
        least_s = _curve(self.small_halves.get(verb) or self.small, size_bytes)
        if verb in PAIRED:
            latency_s, least_s = (s / ring_steps(ranks) for s in (self.latency_s, least_s))
        elif verb != "all_reduce":
            latency_s, _ = self.half(verb, ranks)
            least_s = least_s if self.small_halves.get(verb) else least_s / 2
        line_s = latency_s + self.transfer_s(transfer_s, verb, ranks)
        return (
            np.maximum(least_s, line_s) if isinstance(line_s, np.ndarray) else max(least_s, line_s)
        )

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds of an all_reduce of this size.

        Args:
            size_bytes: bytes of the payload.
        """
        return self.seconds(self.latency_s, size_bytes / self.bytes_per_s, size_bytes)

    def transfer_s(self, transfer_s: Seconds, verb: Verb, ranks: int) -> Seconds:
        """Return the seconds for which a message uses the rate of the link, without its latency.

        Args:
            transfer_s: these seconds of an all_reduce of the payload.
            verb: kind of message.
            ranks: number of ranks of the collective.
        """
        if verb == "broadcast":
            return self.transfer_s(transfer_s, "send", ranks) * _tree_depth(ranks)
        if verb in PAIRED:
            return transfer_s * (self.bytes_per_s / self.send_bytes_per_s(ranks))
        if verb == "all_reduce":
            return transfer_s
        return transfer_s * (self.bytes_per_s / self.half(verb, ranks)[1])

    def has_long_steps(self, ranks: int) -> bool:
        """Return whether a step of a ring all_reduce without bytes takes at least 2 ms.

        Args:
            ranks: number of ranks of the all_reduces that `latency_s` is of.
        """
        return self.latency_s / ring_steps(ranks) >= DISTANT_S

    def send_bytes_per_s(self, ranks: int) -> float:
        """Return the bytes per second that one rank sends to another.

        Args:
            ranks: number of ranks of the all_reduces that `bytes_per_s` is of.
        """
        if self.pair_bytes_per_s is not None:
            return self.pair_bytes_per_s
        return self.bytes_per_s * ring_steps(ranks) / max(ranks, 2)

    def half(self, verb: Verb, ranks: int) -> tuple[float, float]:
        """Return latency in seconds and bytes per second of a half of an all_reduce.

        Args:
            verb: "reduce_scatter" or "all_gather".
            ranks: number of ranks of the all_reduces that `latency_s` is of.
        """
        if verb in self.halves:
            return self.halves[verb]
        if self.pair_bytes_per_s is None:
            return self.latency_s / 2, 2 * self.bytes_per_s
        # A half has K - 1 steps of one K-th of the bytes. gloo's all_gather has the delays of K.
        steps = max(ranks, 2) - 1
        delays = steps + (verb == "all_gather")
        rate = self.pair_bytes_per_s * (steps + 1) / steps
        return self.latency_s * delays / ring_steps(ranks), rate

    def additional_s(self, size_bytes: float, verb: Verb = "all_reduce", ranks: int = 2) -> float:
        """Return the additional seconds of a message after a pause of at least `pause_s`.

        They are interpolated over the logarithm of the size, because TCP's window doubles in each
        round trip, and are constant below the smallest and above the largest measured size. A send
        counts as one step of a ring all_reduce, as in `seconds`.

        Args:
            size_bytes: bytes of the payload.
            verb: kind of message.
            ranks: number of ranks of the collective.
        """
        if not self.after_pause:
            return 0.0
        if verb in (*PAIRED, "broadcast"):
            size_bytes *= max(ranks, 2)
        sizes, seconds = zip(*self.after_pause, strict=True)
        return float(np.interp(np.log(max(size_bytes, 1.0)), np.log(sizes), seconds))


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown of two links that carry messages at the same time.

    Attributes:
        links: names of the links. The same name twice refers to two channels of one link.
        speeds: speed of each link relative to that of the link alone.
    """

    links: tuple[str, str]
    speeds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Statistics of training during the measurement, for estimates of convergence.

    Attributes:
        loss: loss, averaged over ranks.
        gradient_sq: squared norm of the true gradient.
        noise_sq: trace of the covariance of the gradient averaged over the batches of all
            ranks.
        step_size: change of a parameter per iteration, divided by its gradient.
        scale_free: whether the optimizer divides gradients by their magnitude (Adam). A sum of
            gradients over iterations then moves parameters no further than one gradient.
    """

    loss: float
    gradient_sq: float
    noise_sq: float
    step_size: float
    scale_free: bool = False


@dataclass(frozen=True, slots=True)
class ScriptUsage:
    """Use of gradients, weights and the optimizer by a script in the measured iterations. A
    strategy that applies gradients at other times than in `optimizer.step()` depends on it.

    Attributes:
        changes: gradients were changed or replaced before a step, as clipping does.
        reads: gradients were read before a step.
        scales: a gradient scaler has stepped.
        skips: an update was skipped after a backward.
        backwards: largest number of backward passes before one step.
        alters: weights or settings of param groups were changed between backward and step.
        drives: the optimizer has stepped in a method of its own, has evaluated a closure several
            times, or is one of several optimizers.
        hooks: the optimizer has step hooks. With a step per bucket they would run once per bucket.

    Raises:
        ValueError: a field has another type, or `backwards` is below 1.
    """

    changes: bool = False
    reads: bool = False
    scales: bool = False
    skips: bool = False
    backwards: int = 1
    alters: bool = False
    drives: bool = False
    hooks: bool = False

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if type(value) is not type(own.default) or value < own.default:
                kind = "an integer of at least 1" if own.name == "backwards" else "true or false"
                raise ValueError(f"{own.name} ({value!r}) of the script's usage must be {kind}")


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Times of a codec while all ranks use it.

    Attributes:
        name: name of the codec.
        encode_s_per_byte: seconds to encode one byte of the payload.
        decode_s_per_byte: seconds to decode one byte of the payload.
        encode_s_per_pass: further seconds of each encoding.
        decode_s_per_pass: further seconds of each decoding.
        s_per_message: further seconds of each message.
    """

    name: str
    encode_s_per_byte: float
    decode_s_per_byte: float
    encode_s_per_pass: float = 0.0
    decode_s_per_pass: float = 0.0
    s_per_message: float = 0.0


class MessageTerms(NamedTuple):
    """Terms of the message times of one kind over one link, by the fitted line.

    `latency_s` and `transfer_s` hold the latency and the remaining time of each bucket. `before_s`
    and `before_bytes` hold the remaining time and the bytes of all buckets before each bucket. They
    are lists, and `arrays` holds the same terms as arrays.
    """

    latency_s: Any
    transfer_s: Any
    before_s: Any
    before_bytes: Any
    arrays: Any = None

    @classmethod
    def of(cls, alone: Sequence[tuple[float, float, int]]) -> MessageTerms:
        latency_s, transfer_s, sizes = map(list, zip(*alone, strict=True))
        rows = latency_s, transfer_s, [0.0, *accumulate(transfer_s)], [0, *accumulate(sizes)]
        return cls(*rows, cls(*(np.array(row, dtype=np.float64) for row in rows)))


def bucket_terms(bucket: Bucket, link: Link, kind: Kind) -> tuple[float, float, int]:
    """Return (latency_s, remaining seconds, bytes) of a message of one bucket, by the fitted
    line."""
    size = bucket.payload_bytes(kind)
    given = bucket.communication_s.get(link.name)
    if size == 0 and (given is None or kind == "state"):
        return 0.0, 0.0, 0
    if given is None or (size != bucket.size_bytes and not bucket.size_bytes):
        return link.latency_s, size / link.bytes_per_s, size
    latency = min(link.latency_s, given)
    share = 1.0 if size == bucket.size_bytes else size / bucket.size_bytes
    return latency, (given - latency) * share, size


def ring_steps(ranks: int) -> int:
    """Return the number of steps of a ring all_reduce: 2 (K - 1) for K ranks."""
    return 2 * max(ranks - 1, 1)


def _tree_depth(ranks: int) -> int:
    """Return the number of successive sends of a broadcast."""
    return (max(ranks, 2) - 1).bit_length()


def _curve(small: tuple[tuple[int, float], ...], size_bytes: Seconds) -> Seconds:
    """Return the measured seconds of small messages, interpolated and not decreasing with size.

    The curve is constant below the smallest and above the largest measured size. There, the fitted
    line overtakes it.
    """
    if not small:
        return 0.0
    sizes, times_s = _monotone_times(small)
    if isinstance(size_bytes, np.ndarray):
        return np.interp(size_bytes, sizes, times_s)
    return float(np.interp(size_bytes, sizes, times_s)) if size_bytes < sizes[-1] else times_s[-1]


@lru_cache(maxsize=64)
def _monotone_times(small: tuple[tuple[int, float], ...]) -> tuple[list[float], list[float]]:
    """Return sizes and times of measured messages. No time is below that of a smaller message."""
    sizes, times_s = zip(*small, strict=True)
    return [float(size) for size in sizes], list(accumulate(times_s, max))
