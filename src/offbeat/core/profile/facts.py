"""Profile: measurements of one model on one cluster, and the message times that follow from
them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.files import replace_text
from offbeat.core.plan import BUFFERS, BUILT_IN, Kind, Payload, Verb, base_link
from offbeat.core.profile.profile_json import fields_as_json, read_fields
from offbeat.core.profile.records import (
    DISTANT_S,
    Bucket,
    CodecSpeed,
    Contention,
    GradientNoise,
    Link,
    MessageTerms,
    ScriptUsage,
    Seconds,
    bucket_terms,
)
from offbeat.core.profile.validation import validate

SIMULTANEOUS_SPEED = 2 / 3
"""Relative speed of each of two channels of one link that carry messages at the same time.

The link then carries 4/3 of its rate. Source: ASC-WFBP. On distant links see
`Profile.shares_rate_only`.
"""


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
        usage: use of gradients by the script, on which some strategies depend.
        element_bytes: bytes of an element of the parameters, as a mean: 2 for bfloat16. Codecs
            encode elements.
        foreign_share: share of the processors that other programs used, if they disturbed the
            measurement; 0 if they did not, or if it is unknown.
        device: type of the devices that compute, as in torch. FSDP on "cpu" hides no messages.

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
    usage: ScriptUsage = field(default_factory=ScriptUsage)
    element_bytes: float = 4.0
    foreign_share: float = 0.0
    device: str = "cpu"

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
        return facts.has_long_steps(self.world_size)

    def shares_rate_only(self, link: str) -> bool:
        """Return whether the channels of a link share only the time of bytes, not the latency.

        This holds for a distant link whose contention with itself was not measured. A message then
        waits for the transfers (`Link.transfer_s`) of simultaneous messages, and not for their
        latencies.

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
        return self.link(link).send_bytes_per_s(self.world_size)

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
        return tuple(bucket_terms(bucket, facts, kind)[1] for bucket in self.buckets)

    def _parts(self, link: str, kind: Kind) -> MessageTerms:
        """Return the terms of message times. They are cached because planners need them in
        loops."""
        facts = self.link(link)
        key = (facts.name, kind)
        if key not in self._part_cache:
            terms = [bucket_terms(b, facts, kind) for b in self.buckets]
            self._part_cache[key] = MessageTerms.of(terms)
        return self._part_cache[key]

    @cached_property
    def _part_cache(self) -> dict[tuple[str, str], MessageTerms]:
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
        return fields_as_json(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Return the profile that `data`, a result of `to_dict`, describes.

        Args:
            data: result of `to_dict`.

        Raises:
            ValueError: the schema differs, or a field is missing, unknown or out of range.
        """
        return cls(**read_fields(data, {f.name for f in fields(cls)}))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        The file is replaced in one step, so that readers never see a part of it.

        Args:
            path: file to write. Its directory is created.
        """
        replace_text(path, json.dumps(self.to_dict(), indent=1))

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
