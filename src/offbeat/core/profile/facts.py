"""Profiles: measured facts of one model on one cluster, and the message times they imply."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.files import write_text
from offbeat.core.plan import BUFFERS, BUILT_IN, Kind, Payload, Verb, base_link
from offbeat.core.profile.validation import validate

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket, times in seconds per iteration, sizes in bytes.

    `size_bytes` are its gradients (as many as its parameters), `buffer_bytes` the floating-point
    buffers averaged with the parameters, `state_bytes` the optimizer state. `communication_s`
    overrides the alpha-beta estimate per link for a message of `size_bytes`. `tensors` names its
    parameters in ready order, then its buffers, so that a cached profile fixes the layout.
    `activation_bytes` are what its forward keeps for backward; 0 in all buckets: not measured.
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
        """Bytes of this bucket in a message of `kind`."""
        if kind == "grad":
            return self.size_bytes
        return self.size_bytes + self.buffer_bytes if kind == "param" else self.state_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """Alpha-beta model of one link: an all-reduce of M bytes takes latency_s + M / bytes_per_s.

    Fitted on the collective itself, so `bytes_per_s` counts payload, not bytes on the wire.
    `small` are measured (bytes, seconds) of smaller messages, ascending: they take longer than the
    line through the larger ones says (on TCP with gloo up to some 40 KB a constant time).
    `fit_error` is the fit's mean relative error; None when it was not fitted here. `halves` says
    (latency_s, bytes_per_s) of reduce_scatter and all_gather, `small_halves` what small ones take.
    A half without an entry counts as the latency of an all-reduce and half the rest of its time.

    `cpu_s_per_message` and `cpu_s_per_byte` are the processor time that a rank spends on sending
    and that its own compute lacks; 0 where a device computes beside the processor.
    `jitter` is the relative standard deviation of the time of one message from one to the next.
    `vote_s`: what a message of one number per rank takes; None if that was not measured.
    `asked_rate_bps`, `asked_latency_s` (one way) and `asked_loss` describe the network of the
    measurement: the slowest rate, the longest delay and the greatest loss between two ranks. The
    rate is None if it is not known; then the other two are not known either.
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

    def seconds(
        self,
        latency_s: Seconds,
        transfer_s: Seconds,
        size_bytes: Seconds,
        verb: Verb = "all_reduce",
        ranks: int = 2,
    ) -> Seconds:
        """Time of a message, of which an all-reduce takes `latency_s` and `transfer_s` by the line,
        and at least what was measured of that size; arrays for several messages.

        A send that was not measured is one step of the all-reduce, if that is a ring of so many
        `ranks`: it has 2(K-1) of them, of one K-th of the bytes each.
        """
        if verb == "broadcast":  # a tree of sends
            one_s = self.seconds(latency_s, transfer_s, size_bytes, "send", ranks)
            return one_s * (max(ranks, 2) - 1).bit_length()
        least_s = _curve(self.small_halves.get(verb) or self.small, size_bytes)
        if verb == "send":
            steps = 2 * max(ranks - 1, 1)
            sent_s, rate = self.halves.get("send", (self.latency_s / steps, 0.0))
            rate = rate or self.bytes_per_s * steps / max(ranks, 2)
            latency_s, transfer_s = sent_s, transfer_s * (self.bytes_per_s / rate)
            least_s = least_s / steps
        elif verb != "all_reduce":
            half_s, rate = self.halves.get(verb, (self.latency_s, 2 * self.bytes_per_s))
            latency_s, transfer_s = half_s, transfer_s * (self.bytes_per_s / rate)
            least_s = least_s if self.small_halves.get(verb) else least_s / 2
        line_s = latency_s + transfer_s
        return (
            np.maximum(least_s, line_s) if isinstance(line_s, np.ndarray) else max(least_s, line_s)
        )


@dataclass(frozen=True, slots=True)
class Contention:
    """What two links lose while both carry messages: link i then runs at `speeds[i]` of its own.

    The same link twice means two messages at once on two of its channels.
    """

    links: tuple[str, str]
    speeds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """What training looked like while it was observed, for estimates of convergence.

    `loss`: mean over ranks; `gradient_sq`: squared norm of the true gradient; `noise_sq`: trace of
    the covariance of the gradient averaged over all ranks' batches; `step_size` then: how far a
    parameter moves per iteration, over its gradient. `scale_free`: the optimizer divides gradients
    by their size (Adam), so a sum over iterations moves parameters no further than one gradient.
    """

    loss: float
    gradient_sq: float
    noise_sq: float
    step_size: float
    scale_free: bool = False


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """What a codec takes, by its name, on all ranks at once: per byte of the numbers, per pass
    that encodes or decodes, and what else a message takes once."""

    name: str
    encode_s_per_byte: float
    decode_s_per_byte: float
    encode_s_per_pass: float = 0.0
    decode_s_per_pass: float = 0.0
    s_per_message: float = 0.0


Seconds = Any  # a float, or an array of them: one per message

SIMULTANEOUS_SPEED = 2 / 3  # two messages at once on one link: 4/3 of its rate (ASC-WFBP)


@dataclass(frozen=True)
class Profile:
    """Model and links as measured; `buckets` in backward order (first gradient first).

    `update_s` is the optimizer's time, `other_s` what the loop spends outside forward, backward
    and update (data loading, logging), both per iteration; `step_s` what every further call of the
    optimizer costs, where buckets are stepped one by one. Times are means over ranks;
    `rank_scale[r]` is rank r's compute time relative to that mean (empty: all alike).
    `jitter` is the relative standard deviation of one rank's compute from iteration to iteration,
    `rank_jitter[r]` that of rank r (empty: all alike).
    `model` is a fingerprint of the model, empty when unknown. `contention` lists what links lose
    while they run together; other pairs lose nothing, two channels of one link a third each.
    With a `pace` the times are those of emulated hosts, each so many times slower than one core of
    the machine that was measured; 0: times are the machine's own. `codecs`: those that were
    measured; of others encoding takes no time.
    `broadcast_bytes`: size of the module's buffers that training writes, of all dtypes. Rank 0
    broadcasts them in every iteration of a strategy that computes what DDP computes.
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

    def __post_init__(self) -> None:
        validate(self)

    @property
    def jitters(self) -> tuple[float, ...]:
        """Relative standard deviation of every rank's compute."""
        return self.rank_jitter or (self.jitter,) * self.world_size

    @property
    def forward_s(self) -> float:
        """F: forward time of the model."""
        return sum(b.forward_s for b in self.buckets)

    @property
    def backward_s(self) -> float:
        """B: backward time of the model."""
        return sum(b.backward_s for b in self.buckets)

    @property
    def ready_s(self) -> tuple[float, ...]:
        """E_i: when bucket i's gradient exists, from the start of backward."""
        return tuple(accumulate(b.backward_s for b in self.buckets))

    @property
    def bucket_update_s(self) -> tuple[float, ...]:
        """Optimizer time of each bucket: `update_s` in proportion to size (equal if all are 0)."""
        sizes = [b.size_bytes for b in self.buckets]
        if not any(sizes):
            sizes = [1] * len(sizes)
        total = sum(sizes)
        return tuple(self.update_s * size / total for size in sizes)

    @property
    def bucket_step_s(self) -> tuple[float, ...]:
        """Optimizer time of each bucket that is stepped by itself."""
        return tuple(self.step_s + seconds for seconds in self.bucket_update_s)

    @property
    def default_link(self) -> Link:
        """The link that one-link strategies use: the first."""
        return self.links[0]

    def link(self, name: str) -> Link:
        """The link of that name, or the one that this is a channel of; ValueError if there is
        none."""
        base = base_link(name)
        if base not in self._links:
            known = ", ".join(self._links)
            raise ValueError(f"link ({name!r}) must be one of the profile's links: {known}")
        return self._links[base]

    def speed(self, link: str, others: Iterable[str]) -> float:
        """Share of its speed at which a link (or channel) runs while `others` carry messages:
        the product of what it loses to each. But all channels of one link together never carry
        less than two of them do."""
        mine, speed, channels = base_link(link), 1.0, 1
        for other in map(base_link, others):
            default = SIMULTANEOUS_SPEED if mine == other else 1.0
            speed *= self._speeds.get((mine, other), default)
            channels += mine == other
        if channels > 2:
            two = self._speeds.get((mine, mine), SIMULTANEOUS_SPEED)
            speed *= max(1.0, 2 * two / channels / two ** (channels - 1))
        return speed

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
        return {link.name: link for link in self.links}

    def payload_bytes(self, kind: Kind, buckets: range) -> int:
        """Bytes of one message of `kind` over neighbouring buckets."""
        if kind == "buffers":
            return self.broadcast_bytes
        return sum(self.buckets[i].payload_bytes(kind) for i in buckets)

    def bytes_of(self, payload: Payload) -> int:
        """Bytes of a payload; of a slice, up to one tensor element."""
        kind = BUILT_IN[payload.buffer].kind
        held = payload.slice_of(self.payload_bytes(kind, payload.buckets))
        return held.stop - held.start

    def message_s(self, payload: Payload, link: str, verb: Verb = "all_reduce") -> float:
        """Time of one message, alone on the link: one latency, all bytes, and at least what was
        measured of that size; nothing if it is empty. Planners and the simulator use this one."""
        if payload.buffer == BUFFERS:
            return self._broadcast_s(link, verb)
        parts = self._parts(link, BUILT_IN[payload.buffer].kind)
        start, stop = payload.buckets.start, payload.buckets.stop
        latency_s = max(parts.latency_s[start:stop], default=0.0)
        transfer_s = parts.before_s[stop] - parts.before_s[start]
        if not latency_s and not transfer_s:
            return 0.0
        share = payload.width / payload.parts
        size_bytes = (parts.before_bytes[stop] - parts.before_bytes[start]) * share
        return self.link(link).seconds(
            latency_s, transfer_s * share, size_bytes, verb, self.world_size
        )

    def codec_speed(self, name: str) -> CodecSpeed:
        """What a codec takes; nothing if it was not measured."""
        found = (speed for speed in self.codecs if speed.name == name)
        return next(found, CodecSpeed(name, 0.0, 0.0))

    def send_bytes_per_s(self, link: str) -> float:
        """Bytes per second that one rank sends to another."""
        facts, one = self.link(link), 1 << 30
        seconds = facts.seconds(0.0, one / facts.bytes_per_s, one, "send", self.world_size)
        return one / (seconds - facts.seconds(0.0, 0.0, 0, "send", self.world_size))

    def messages_ending_s(
        self, link: str, kind: Kind, first: int, stop: int
    ) -> NDArray[np.float64]:
        """`message_s` of the runs of buckets [first, stop), [first + 1, stop), ... together."""
        parts = self._parts(link, kind)
        latency_s = np.maximum.accumulate(parts.arrays[0][first:stop][::-1])[::-1]
        transfer_s, size_bytes = (row[stop] - row[first:stop] for row in parts.arrays[1:])
        seconds = self.link(link).seconds(latency_s, transfer_s, size_bytes)
        return np.where(latency_s + transfer_s > 0, seconds, 0.0)

    def _broadcast_s(self, link: str, verb: Verb) -> float:
        size, facts = self.broadcast_bytes, self.link(link)
        if not size:
            return 0.0
        transfer_s = size / facts.bytes_per_s
        return facts.seconds(facts.latency_s, transfer_s, size, verb, self.world_size)

    def bucket_message_s(self, link: str, kind: Kind, parts: int = 1) -> list[float]:
        """`message_s` of every bucket by itself, or of one of so many equal slices of it."""
        latency_s, *before = self._parts(link, kind).arrays
        transfer_s, size_bytes = (np.diff(row) for row in before)
        share = 1 / parts
        seconds = self.link(link).seconds(latency_s, transfer_s * share, size_bytes * share)
        return np.where(latency_s + transfer_s > 0, seconds, 0.0).tolist()

    def communication_s(self, link: str, kind: Kind = "grad") -> tuple[float, ...]:
        """c_i: time of each bucket sent alone; an empty bucket takes no time."""
        return tuple(self.bucket_message_s(link, kind))

    def sending_s(self, payload: Payload, link: str, verb: Verb = "all_reduce") -> float:
        """Processor time of one message on every rank that sends it: its compute lasts so much
        longer."""
        facts, size_bytes = self.link(link), self.bytes_of(payload)
        if not size_bytes:
            return 0.0
        cpu_s = facts.cpu_s_per_message + facts.cpu_s_per_byte * size_bytes
        return cpu_s if verb == "all_reduce" else cpu_s / 2

    def transfer_s(self, link: str, kind: Kind = "grad") -> tuple[float, ...]:
        """Each bucket's share of a fused message's time by the line, without the latency."""
        facts = self.link(link)
        return tuple(_alone(bucket, facts, kind)[1] for bucket in self.buckets)

    def _parts(self, link: str, kind: Kind) -> _Parts:
        """What messages are made of; cached, as planners ask in loops."""
        facts = self.link(link)
        key = (facts.name, kind)
        if key not in self._part_cache:
            self._part_cache[key] = _Parts.of([_alone(b, facts, kind) for b in self.buckets])
        return self._part_cache[key]

    @cached_property
    def _part_cache(self) -> dict[tuple[str, str], _Parts]:
        return {}

    def with_pace(
        self, pace: float, speeds: Sequence[float] = (), jitters: Sequence[float] = ()
    ) -> Profile:
        """The profile of hosts that are emulated at another pace. Rank r computes at `speeds[r]`
        times it (empty: as before, or all alike), with jitter `jitters[r]`. Messages take nothing
        from their compute: it has time to spare.

        ValueError for a pace below 1: no host can be emulated that is faster than this machine.
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
        return replace(
            self,
            buckets=tuple(
                replace(b, forward_s=b.forward_s * by, backward_s=b.backward_s * by)
                for b in self.buckets
            ),
            links=tuple(
                replace(link, cpu_s_per_message=0.0, cpu_s_per_byte=0.0) for link in self.links
            ),
            update_s=self.update_s * by,
            step_s=self.step_s * by,
            other_s=self.other_s * again,
            pace=pace,
            **changed,
        )

    def slowest(self) -> Profile:
        """The profile as the slowest rank sees it, for planners: compute times scaled."""
        scale = max(self.rank_scale, default=1.0)
        if scale == 1.0:
            return self
        buckets = tuple(
            replace(b, forward_s=b.forward_s * scale, backward_s=b.backward_s * scale)
            for b in self.buckets
        )
        times = {"update_s": self.update_s * scale, "step_s": self.step_s * scale}
        return replace(self, buckets=buckets, rank_scale=(), **times)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; optional fields are left out at their defaults."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "update_s": self.update_s,
            "links": [_compact(link) for link in self.links],
            "buckets": [_compact(bucket) for bucket in self.buckets],
        }
        if self.other_s:
            data["other_s"] = self.other_s
        if self.rank_scale:
            data["rank_scale"] = list(self.rank_scale)
        if self.step_s:
            data["step_s"] = self.step_s
        if self.jitter:
            data["jitter"] = self.jitter
        if self.pace:
            data["pace"] = self.pace
        if self.rank_jitter:
            data["rank_jitter"] = list(self.rank_jitter)
        if self.model:
            data["model"] = self.model
        if self.contention:
            data["contention"] = [_compact(contention) for contention in self.contention]
        if self.noise is not None:
            data["noise"] = _compact(self.noise)
        if self.codecs:
            data["codecs"] = [_compact(codec) for codec in self.codecs]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Inverse of `to_dict`; ValueError naming the field on bad input."""
        if not isinstance(data, Mapping):
            raise ValueError("a profile must be a JSON object; see `offbeat profile`")
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"schema ({data.get('schema')!r}) of the profile must be {SCHEMA}; "
                "measure it again with `offbeat profile`"
            )
        known = {"schema", *(f.name for f in fields(cls))}
        _reject_unknown("profile", data, known)
        for key in ("world_size", "links", "buckets"):
            if key not in data:
                raise ValueError(f"the profile lacks {key!r}")
        return cls(
            buckets=tuple(_record(Bucket, "bucket", b) for b in data["buckets"]),
            links=tuple(_record(Link, "link", link) for link in data["links"]),
            world_size=data["world_size"],
            update_s=data.get("update_s", 0.0),
            other_s=data.get("other_s", 0.0),
            rank_scale=tuple(data.get("rank_scale", ())),
            step_s=data.get("step_s", 0.0),
            jitter=data.get("jitter", 0.0),
            rank_jitter=tuple(data.get("rank_jitter", ())),
            model=data.get("model", ""),
            contention=tuple(
                _record(Contention, "contention", c) for c in data.get("contention", ())
            ),
            noise=_record(GradientNoise, "noise", data["noise"]) if data.get("noise") else None,
            pace=data.get("pace", 0.0),
            codecs=tuple(_record(CodecSpeed, "codec", c) for c in data.get("codecs", ())),
            broadcast_bytes=data.get("broadcast_bytes", 0),
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON, in one move so that a reader never sees half a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        write_text(draft, json.dumps(self.to_dict(), indent=1))
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read from JSON; ValueError naming the file on bad input."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); measure it again") from None
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


class _Parts(NamedTuple):
    """What the messages of one kind over one link are made of, by the line: each bucket's latency,
    and the rest of the time and the bytes of all buckets before it."""

    latency_s: list[float]
    before_s: list[float]
    before_bytes: list[int]
    arrays: tuple[NDArray[np.float64], ...]  # the same three

    @classmethod
    def of(cls, alone: Sequence[tuple[float, float, int]]) -> _Parts:
        latency_s, transfer_s, sizes = zip(*alone, strict=True)
        rows = list(latency_s), [0.0, *accumulate(transfer_s)], [0, *accumulate(sizes)]
        return cls(*rows, tuple(np.array(row, dtype=np.float64) for row in rows))


def _alone(bucket: Bucket, link: Link, kind: Kind) -> tuple[float, float, int]:
    """(latency, the rest, bytes) of a message with one bucket, by the line."""
    size = bucket.payload_bytes(kind)
    given = bucket.communication_s.get(link.name)
    if size == 0 and (given is None or kind == "state"):
        return 0.0, 0.0, 0
    if given is None or (size != bucket.size_bytes and not bucket.size_bytes):
        return link.latency_s, size / link.bytes_per_s, size
    latency = min(link.latency_s, given)
    share = 1.0 if size == bucket.size_bytes else size / bucket.size_bytes
    return latency, (given - latency) * share, size


def _curve(small: tuple[tuple[int, float], ...], size_bytes: Seconds) -> Seconds:
    """Measured times as a curve that never falls: flat below and above them, so that it ends where
    the line overtakes it."""
    if not small:
        return 0.0
    sizes, times_s = _never_falling(small)
    if isinstance(size_bytes, np.ndarray):
        return np.interp(size_bytes, sizes, times_s)
    return float(np.interp(size_bytes, sizes, times_s)) if size_bytes < sizes[-1] else times_s[-1]


@lru_cache(maxsize=64)
def _never_falling(small: tuple[tuple[int, float], ...]) -> tuple[list[float], list[float]]:
    """Sizes and times of measured messages, no time below that of a smaller message."""
    sizes, times_s = zip(*small, strict=True)
    return [float(size) for size in sizes], list(accumulate(times_s, max))


def _compact(record: Any) -> dict[str, Any]:
    """Fields of a record without those at their defaults."""
    values = {f: getattr(record, f.name) for f in fields(record)}
    return {f.name: value for f, value in values.items() if value != _default(f)}


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


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
        return cls(**{k: _tuples(v) for k, v in data.items()})
    except TypeError:
        raise ValueError(
            f"{what} {data.get('name', '?')!r} must have the fields {', '.join(sorted(known))}"
        ) from None


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
