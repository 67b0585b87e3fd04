"""Profile: measurements of one model on one cluster, and the message times that follow from
them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.files import write_text
from offbeat.core.plan import BUFFERS, BUILT_IN, Kind, Payload, Verb, base_link
from offbeat.core.plan.text import compact
from offbeat.core.profile.validation import validate
from offbeat.former_names import REMOVED_IN

SCHEMA = 2
FLAT_SCHEMA = 1  # of profiles in which every replica has one rank; earlier versions read them


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
        activation_bytes: bytes that its forward stores for backward; 0 in all buckets if not
            measured.
    """

    name: str
    forward_s: float
    backward_s: float
    size_bytes: int
    communication_s: Mapping[str, float] = field(default_factory=dict)
    buffer_bytes: int = 0
    state_bytes: int = 0
    tensors: tuple[str, ...] = ()
    activation_bytes: int = 0

    def payload_bytes(self, kind: Kind) -> int:
        """Return the bytes of this bucket in a message.

        Args:
            kind: kind of the buffer: "grad", "param" or "state".
        """
        if kind == "grad":
            return self.size_bytes
        return self.size_bytes + self.buffer_bytes if kind == "param" else self.state_bytes


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
            a half takes the latency of an all_reduce and half of its remaining time.
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
        bytes for K ranks. In such a step each rank sends and receives, so an exchange takes the
        time of a send. A broadcast is a tree of sends.

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
            latency_s, _ = self._half(verb)
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
            return transfer_s * (max(ranks, 2) / ring_steps(ranks))
        return transfer_s if verb == "all_reduce" else transfer_s * self._half(verb)[1]

    def _half(self, verb: Verb) -> tuple[float, float]:
        """Return latency of a half of an all_reduce, and its remaining time over that of the
        whole."""
        latency_s, rate = self.halves.get(verb, (self.latency_s, 2 * self.bytes_per_s))
        return latency_s, self.bytes_per_s / rate

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


Seconds = Any  # a float, or an array of them: one per message

SIMULTANEOUS_SPEED = 2 / 3
"""Relative speed of each of two channels of one link that carry messages at the same time.

The link then carries 4/3 of its rate. Source: ASC-WFBP. On distant links see
`Profile.shares_rate_only`.
"""

DISTANT_S = 2e-3
"""Seconds of one step of a ring without bytes, a round trip, from which a link is distant."""

PAIRED = ("send", "exchange")  # verbs between two ranks

# Fields of a profile that are lists of records, with the name of a record in messages.
RECORDS = (
    ("buckets", "bucket", Bucket),
    ("links", "link", Link),
    ("contention", "contention", Contention),
    ("codecs", "codec", CodecSpeed),
)

FORMER_METHODS = {
    "alone_s": "bucket_message_s",
    "paced": "with_pace",
    "sent_per_s": "send_bytes_per_s",
}


@dataclass(frozen=True)
class Profile:
    """Measurements of one model on one cluster. Times are means over ranks, in seconds per
    iteration.

    Attributes:
        buckets: buckets in backward order (first gradient first).
        links: links between replicas; the first is the default.
        world_size: number of replicas. Without `topology` every rank holds a replica of its own, so
            it is the number of ranks.
        update_s: seconds of the optimizer.
        other_s: seconds outside forward, backward and optimizer, such as data loading and
            logging.
        rank_scale: compute time of each rank relative to the mean; empty if all are equal.
        step_s: seconds of each further call of the optimizer if buckets are stepped one by one.
        jitter: relative standard deviation of the compute time of a rank over iterations.
        rank_jitter: jitter of each rank; empty if all are equal.
        model: fingerprint of the model; empty if unknown.
        contention: slowdown of links that carry messages at the same time. Other pairs of links
            do not slow down; two channels of one link lose a third of their speed each.
        noise: statistics for estimates of convergence; None if not measured.
        pace: slowdown of the emulated hosts relative to one core of the measured machine; 0 if
            the times are those of the machine.
        codecs: times of the measured codecs. Other codecs take no time.
        broadcast_bytes: bytes of all module buffers that training writes, of all dtypes. Rank 0
            broadcasts these buffers in each iteration of a strategy that computes the same as DDP.
        topology: number of ranks of each replica; empty if every replica has one rank. Properties
            of single ranks (`rank_scale`, `rank_jitter`) are then those of replicas.
        inside: link between the ranks of a replica, which average gradients over it in every
            iteration; None if they do not.
        sharded: whether each rank holds a part of its replica. Sizes are those of these parts.

    Raises:
        ValueError: a field is out of range or contradicts another field.
    """

    buckets: tuple[Bucket, ...]
    links: tuple[Link, ...]
    world_size: int
    update_s: float = 0.0
    other_s: float = 0.0
    rank_scale: tuple[float, ...] = ()
    step_s: float = 0.0
    jitter: float = 0.0
    rank_jitter: tuple[float, ...] = ()
    model: str = ""
    contention: tuple[Contention, ...] = ()
    noise: GradientNoise | None = None
    pace: float = 0.0
    codecs: tuple[CodecSpeed, ...] = ()
    broadcast_bytes: int = 0
    topology: tuple[int, ...] = ()
    inside: Link | None = None
    sharded: bool = False

    def __getattr__(self, name: str) -> Any:
        # Return the method that a former name stands for, with a warning, until version 0.3.
        if name not in FORMER_METHODS:
            raise AttributeError(f"'Profile' object has no attribute {name!r}")
        new = FORMER_METHODS[name]
        text = (
            f"Profile.{name} is now Profile.{new}; the former name will be removed in {REMOVED_IN}"
        )
        warnings.warn(text, FutureWarning, stacklevel=2)
        return getattr(self, new)

    def __post_init__(self) -> None:
        validate(self)

    @property
    def jitters(self) -> tuple[float, ...]:
        """Return the relative standard deviation of each rank's compute time."""
        return self.rank_jitter or (self.jitter,) * self.world_size

    @property
    def forward_s(self) -> float:
        """Return F, the seconds of the forward of the model."""
        return sum(b.forward_s for b in self.buckets)

    @property
    def backward_s(self) -> float:
        """Return B, the seconds of the backward of the model."""
        return sum(b.backward_s for b in self.buckets)

    @property
    def compute_s(self) -> float:
        """Return the seconds of one iteration without messages and with one optimizer call."""
        return self.other_s + self.forward_s + self.backward_s + self.update_s

    @property
    def ready_s(self) -> tuple[float, ...]:
        """Return E_i for each bucket i: seconds from the start of backward until its gradient is
        complete."""
        return tuple(accumulate(b.backward_s for b in self.buckets))

    @property
    def bucket_update_s(self) -> tuple[float, ...]:
        """Return the optimizer seconds of each bucket: `update_s` in proportion to size (equal
        if all sizes are 0)."""
        sizes = [b.size_bytes for b in self.buckets]
        if not any(sizes):
            sizes = [1] * len(sizes)
        total = sum(sizes)
        return tuple(self.update_s * size / total for size in sizes)

    @property
    def bucket_step_s(self) -> tuple[float, ...]:
        """Return the optimizer seconds of each bucket if buckets are stepped one by one."""
        return tuple(self.step_s + seconds for seconds in self.bucket_update_s)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the job."""
        return sum(self.topology) or self.world_size

    @property
    def scale_of_ranks(self) -> tuple[float, ...]:
        """Return the compute time of each rank relative to the mean, replica by replica."""
        scale = self.rank_scale or (1.0,) * self.world_size
        sizes = self.topology or (1,) * self.world_size
        return tuple(one for one, size in zip(scale, sizes, strict=True) for _ in range(size))

    @property
    def all_links(self) -> tuple[Link, ...]:
        """Return the links between replicas, then the link inside a replica."""
        return self.links if self.inside is None else (*self.links, self.inside)

    def of_replicas(self) -> Profile:
        """Return the profile without the ranks of a replica and the link between them."""
        if not self.topology:
            return self
        names = {link.name for link in self.links}
        contention = tuple(c for c in self.contention if names.issuperset(c.links))
        return replace(self, topology=(), inside=None, sharded=False, contention=contention)

    @property
    def default_link(self) -> Link:
        """Return the link of strategies that use one link: the first."""
        return self.links[0]

    def link(self, name: str) -> Link:
        """Return a link.

        Args:
            name: name of the link or of one of its channels.

        Raises:
            ValueError: the profile has no such link.
        """
        base = base_link(name)
        if base not in self._links:
            known = ", ".join(self._links)
            raise ValueError(f"link ({name!r}) must be one of the profile's links: {known}")
        return self._links[base]

    def speed(self, link: str, others: Iterable[str]) -> float:
        """Return the relative speed of a link while other links carry messages.

        The speed is the product of the slowdowns by each other message. All channels of one link
        together carry at least as much as two of them.

        Args:
            link: name of the link or channel.
            others: links or channels that carry one message each.

        Returns:
            Speed relative to that of the link alone.
        """
        base, speed, channels = base_link(link), 1.0, 1
        for other in map(base_link, others):
            default = SIMULTANEOUS_SPEED if base == other else 1.0
            speed *= self._speeds.get((base, other), default)
            channels += base == other
        if channels > 2:
            two = self._speeds.get((base, base), SIMULTANEOUS_SPEED)
            speed *= max(1.0, 2 * two / channels / two ** (channels - 1))
        return speed

    def is_distant(self, link: str) -> bool:
        """Return whether a round trip on a link between replicas takes at least 2 ms.

        The recorded delay of the network decides, or else the latency of an all_reduce.

        Args:
            link: name of the link or channel.
        """
        facts = self.link(link)
        if facts is self.inside:
            return False
        if facts.asked_rate_bps is not None:
            return 2 * facts.asked_latency_s >= DISTANT_S
        return facts.latency_s / ring_steps(self.world_size) >= DISTANT_S

    def shares_rate_only(self, link: str) -> bool:
        """Return whether the channels of a link share only the time of bytes, not the latency.

        This holds for a distant link whose contention with itself was not measured. Each message
        uses the rate for a share of its time (`Link.transfer_s`). Simultaneous messages slow each
        other down only as far as these shares add up to more than 1.

        Args:
            link: name of the link or channel.
        """
        base = base_link(link)
        return (base, base) not in self._speeds and self.is_distant(link)

    @cached_property
    def _speeds(self) -> dict[tuple[str, str], float]:
        speeds: dict[tuple[str, str], float] = {}
        for c in self.contention:
            (a, b), (speed_a, speed_b) = c.links, c.speeds
            speeds[b, a] = speed_b
            speeds[a, b] = speed_a
        return speeds

    @cached_property
    def _links(self) -> dict[str, Link]:
        return {link.name: link for link in self.all_links}

    def payload_bytes(self, kind: Kind, buckets: range) -> int:
        """Return the bytes of a message over adjacent buckets.

        Args:
            kind: kind of the buffer.
            buckets: run of buckets.
        """
        if kind == "buffers":
            return self.broadcast_bytes
        return sum(self.buckets[i].payload_bytes(kind) for i in buckets)

    def bytes_of(self, payload: Payload) -> int:
        """Return the bytes of a payload. For a slice, the result is exact up to one element.

        Args:
            payload: content of the message.
        """
        kind = BUILT_IN[payload.buffer].kind
        held = payload.slice_of(self.payload_bytes(kind, payload.buckets))
        return held.stop - held.start

    def message_s(self, payload: Payload, link: str, verb: Verb = "all_reduce") -> float:
        """Return the seconds of one message on an idle link.

        Planners and the simulator use this function. The result is one latency and the time of all
        bytes, but at least the measured time of that size.

        Args:
            payload: content of the message.
            link: name of the link or channel.
            verb: kind of message.

        Returns:
            Seconds from release to completion; 0 for an empty message.

        Raises:
            ValueError: the profile has no such link.
        """
        latency_s, transfer_s, size_bytes = self._message_terms(payload, link)
        if not latency_s and not transfer_s:
            return 0.0
        return self.link(link).seconds(latency_s, transfer_s, size_bytes, verb, self.world_size)

    def message_transfer_s(self, payload: Payload, link: str, verb: Verb = "all_reduce") -> float:
        """Return the part of `message_s` in which a message uses the rate of the link.

        Args:
            payload: content of the message.
            link: name of the link or channel.
            verb: kind of message.
        """
        _, transfer_s, _ = self._message_terms(payload, link)
        return self.link(link).transfer_s(transfer_s, verb, self.world_size)

    def _message_terms(self, payload: Payload, link: str) -> tuple[float, float, float]:
        """Return latency, remaining seconds and bytes of an all_reduce of a payload; zeros if it is
        empty."""
        if payload.buffer == BUFFERS:
            size, facts = self.broadcast_bytes, self.link(link)
            return (facts.latency_s, size / facts.bytes_per_s, size) if size else (0.0, 0.0, 0)
        parts = self._parts(link, BUILT_IN[payload.buffer].kind)
        start, stop = payload.buckets.start, payload.buckets.stop
        latency_s = max(parts.latency_s[start:stop], default=0.0)
        if stop - start == 1:
            transfer_s = parts.transfer_s[start]
        else:
            transfer_s = parts.before_s[stop] - parts.before_s[start]
        share = payload.width / payload.parts
        size_bytes = (parts.before_bytes[stop] - parts.before_bytes[start]) * share
        return latency_s, transfer_s * share, size_bytes

    def codec_speed(self, name: str) -> CodecSpeed:
        """Return the times of a codec; zeros if it was not measured.

        Args:
            name: name of the codec.
        """
        found = (speed for speed in self.codecs if speed.name == name)
        return next(found, CodecSpeed(name, 0.0, 0.0))

    def send_bytes_per_s(self, link: str) -> float:
        """Return the bytes per second that one rank sends to another over a link.

        Args:
            link: name of the link or channel.
        """
        facts, one = self.link(link), 1 << 30
        seconds = facts.seconds(0.0, one / facts.bytes_per_s, one, "send", self.world_size)
        return one / (seconds - facts.seconds(0.0, 0.0, 0, "send", self.world_size))

    def messages_ending_s(
        self, link: str, kind: Kind, first: int, stop: int
    ) -> NDArray[np.float64]:
        """Return `message_s` of the runs of buckets [i, stop) for i from `first` to `stop - 1`.

        Args:
            link: name of the link or channel.
            kind: kind of the buffer.
            first: first bucket of the longest run.
            stop: end of all runs.

        Returns:
            Array of seconds, `[stop - first]`.
        """
        rows = self._parts(link, kind).arrays
        latency_s = np.maximum.accumulate(rows.latency_s[first:stop][::-1])[::-1]
        transfer_s, size_bytes = (
            row[stop] - row[first:stop] for row in (rows.before_s, rows.before_bytes)
        )
        transfer_s[-1:] = rows.transfer_s[first:stop][-1:]
        return self._seconds_of_each(link, latency_s, transfer_s, size_bytes)

    def bucket_message_s(self, link: str, kind: Kind, parts: int = 1) -> list[float]:
        """Return `message_s` of each bucket.

        Args:
            link: name of the link or channel.
            kind: kind of the buffer.
            parts: number of equal slices; the result is the time of one slice.
        """
        rows, share = self._parts(link, kind).arrays, 1 / parts
        transfer_s, size_bytes = rows.transfer_s * share, np.diff(rows.before_bytes) * share
        return self._seconds_of_each(link, rows.latency_s, transfer_s, size_bytes).tolist()

    def _seconds_of_each(
        self, link: str, latency_s: Seconds, transfer_s: Seconds, size_bytes: Seconds
    ) -> NDArray[np.float64]:
        """Return `message_s` of several messages, given by their terms."""
        seconds = self.link(link).seconds(latency_s, transfer_s, size_bytes)
        return np.where(latency_s + transfer_s > 0, seconds, 0.0)

    def communication_s(self, link: str, kind: Kind = "grad") -> tuple[float, ...]:
        """Return c_i for each bucket i: the seconds of a message of the bucket alone.

        Args:
            link: name of the link or channel.
            kind: kind of the buffer: "grad", "param" or "state".

        Returns:
            Seconds of each bucket; 0 for an empty bucket.
        """
        return tuple(self.bucket_message_s(link, kind))

    def sending_s(self, payload: Payload, link: str, verb: Verb = "all_reduce") -> float:
        """Return the processor seconds by which a message delays the compute of each sender.

        Args:
            payload: content of the message.
            link: name of the link or channel.
            verb: kind of message.
        """
        facts, size_bytes = self.link(link), self.bytes_of(payload)
        if not size_bytes:
            return 0.0
        cpu_s = facts.cpu_s_per_message + facts.cpu_s_per_byte * size_bytes
        return cpu_s if verb == "all_reduce" else cpu_s / 2

    def transfer_s(self, link: str, kind: Kind = "grad") -> tuple[float, ...]:
        """Return the seconds that each bucket adds to a fused message, without the latency.

        Args:
            link: name of the link or channel.
            kind: kind of the buffer: "grad", "param" or "state".
        """
        facts = self.link(link)
        return tuple(_bucket_terms(bucket, facts, kind)[1] for bucket in self.buckets)

    def _parts(self, link: str, kind: Kind) -> _Parts:
        """Return the terms of message times. They are cached because planners need them in
        loops."""
        facts = self.link(link)
        key = (facts.name, kind)
        if key not in self._part_cache:
            self._part_cache[key] = _Parts.of([_bucket_terms(b, facts, kind) for b in self.buckets])
        return self._part_cache[key]

    @cached_property
    def _part_cache(self) -> dict[tuple[str, str], _Parts]:
        return {}

    def with_pace(
        self, pace: float, speeds: Sequence[float] = (), jitters: Sequence[float] = ()
    ) -> Profile:
        """Return the profile of hosts that are emulated at another pace.

        Messages do not delay the compute of such hosts, because the processor has idle time.

        Args:
            pace: slowdown relative to one core of the measured machine.
            speeds: speed of each rank relative to the pace. If empty, ratios between ranks
                remain; without a previous pace, all ranks are equal.
            jitters: jitter of each rank. If empty, jitters remain; without a previous pace,
                they are 0.

        Raises:
            ValueError: a host would be faster than the measured machine.
        """
        fastest = pace / max(speeds, default=1.0)
        if not (math.isfinite(pace) and fastest >= 1):
            raise ValueError(
                f"pace ({pace:g}) over the greatest speed ({max(speeds, default=1.0):g}) must be "
                "at least 1: a host cannot be faster than this machine"
            )
        again = pace / (self.pace or 1.0)
        scale = [1 / speed for speed in speeds] or [1.0]
        mean = sum(scale) / len(scale)
        by = again * mean
        changed: dict[str, Any] = {}
        if not self.pace or speeds:
            alike = min(scale) == max(scale)
            changed["rank_scale"] = () if alike else tuple(s / mean for s in scale)
        if not self.pace or jitters:
            alike = len(set(jitters)) <= 1
            changed["jitter"] = sum(jitters) / len(jitters) if jitters else 0.0
            changed["rank_jitter"] = () if alike else tuple(jitters)
        idle = {"cpu_s_per_message": 0.0, "cpu_s_per_byte": 0.0}
        return replace(
            self,
            links=tuple(replace(link, **idle) for link in self.links),
            inside=None if self.inside is None else replace(self.inside, **idle),
            other_s=self.other_s * again,
            pace=pace,
            **scaled_compute(self, by),
            **changed,
        )

    def slowest(self) -> Profile:
        """Return the profile with the compute times of the slowest rank, for planners."""
        scale = max(self.rank_scale, default=1.0)
        if scale == 1.0:
            return self
        return replace(self, rank_scale=(), **scaled_compute(self, scale))

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON types. Optional fields with default values are left out."""
        schema = SCHEMA if self.topology else FLAT_SCHEMA
        head = {"schema": schema, "world_size": self.world_size, "update_s": self.update_s}
        return head | {name: _as_json(value) for name, value in compact(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Return the profile that `data`, a result of `to_dict`, describes.

        Args:
            data: result of `to_dict`.

        Raises:
            ValueError: the schema differs, or a field is missing, unknown or out of range.
        """
        if not isinstance(data, Mapping):
            raise ValueError("a profile must be a JSON object; see `offbeat profile`")
        if data.get("schema") not in (FLAT_SCHEMA, SCHEMA):
            raise ValueError(
                f"schema ({data.get('schema')!r}) of the profile must be {FLAT_SCHEMA} or "
                f"{SCHEMA}; measure it again with `offbeat profile`"
            )
        known = {"schema", *(f.name for f in fields(cls))}
        _reject_unknown("profile", data, known)
        for key in ("world_size", "links", "buckets"):
            if key not in data:
                raise ValueError(f"the profile lacks {key!r}")
        values = {name: _as_tuples(value) for name, value in data.items() if name != "schema"}
        for name, what, record in RECORDS:
            values[name] = tuple(_record(record, what, one) for one in data.get(name, ()))
        noise = data.get("noise")
        values["noise"] = _record(GradientNoise, "noise", noise) if noise else None
        inside = data.get("inside")
        values["inside"] = _record(Link, "link", inside) if inside else None
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        The file is replaced in one step, so that readers never see a part of it.

        Args:
            path: file to write. Its directory is created.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        write_text(draft, json.dumps(self.to_dict(), indent=1))
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Return the profile of a JSON file.

        Args:
            path: file that `save` or `offbeat profile` has written.

        Raises:
            ValueError: the file is not JSON or not a profile. The message names the file.
        """
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); measure it again") from None
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def scaled_compute(profile: Profile, factor: float) -> dict[str, Any]:
    """Return the fields with times of forward, backward and updates, multiplied by `factor`."""
    return {
        "buckets": tuple(
            replace(b, forward_s=b.forward_s * factor, backward_s=b.backward_s * factor)
            for b in profile.buckets
        ),
        "update_s": profile.update_s * factor,
        "step_s": profile.step_s * factor,
    }


class _Parts(NamedTuple):
    """Terms of the message times of one kind over one link, by the fitted line.

    `latency_s` and `transfer_s` hold the latency and the remaining time of each bucket. `before_s`
    and `before_bytes` hold the remaining time and the bytes of all buckets before each bucket. In
    `_parts`, they are lists, and `arrays` holds the same terms as arrays.
    """

    latency_s: Any
    transfer_s: Any
    before_s: Any
    before_bytes: Any
    arrays: Any = None

    @classmethod
    def of(cls, alone: Sequence[tuple[float, float, int]]) -> _Parts:
        latency_s, transfer_s, sizes = map(list, zip(*alone, strict=True))
        rows = latency_s, transfer_s, [0.0, *accumulate(transfer_s)], [0, *accumulate(sizes)]
        return cls(*rows, cls(*(np.array(row, dtype=np.float64) for row in rows)))


def _bucket_terms(bucket: Bucket, link: Link, kind: Kind) -> tuple[float, float, int]:
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


def _as_json(value: Any) -> Any:
    """Return the value of a field as JSON types."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return compact(value) if is_dataclass(value) else value


def _reject_unknown(what: str, data: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{what} field ({unknown[0]!r}) must be one of {', '.join(sorted(known))}")


def _record(cls: type, what: str, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} ({data!r}) must be a JSON object")
    known = {f.name for f in fields(cls)}
    _reject_unknown(f"{what} {data.get('name', '?')!r}", data, known)
    try:
        return cls(**{k: _as_tuples(v) for k, v in data.items()})
    except TypeError:
        raise ValueError(
            f"{what} {data.get('name', '?')!r} must have the fields {', '.join(sorted(known))}"
        ) from None


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuples(one) for name, one in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
