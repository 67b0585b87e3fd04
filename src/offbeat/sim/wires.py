"""Wires in time: what a message takes whose codes travel in place of its numbers.

The link's thread encodes and decodes, so both are part of the message. Where messages take
processor time from compute, so do they.
"""

from __future__ import annotations

from dataclasses import replace

from offbeat.numerics.codecs import Codec, codec, way
from offbeat.plan import Kind, Payload, Verb, Wire
from offbeat.profile import Link, Profile

ELEMENT_BYTES = 4  # of what is encoded; a profile does not know dtypes


class Encoded:
    """One payload of a profile over a wire."""

    def __init__(self, profile: Profile, payload: Payload, wire: Wire, verb: Verb) -> None:
        self._profile, self._payload = profile, payload
        self._verb: Verb = verb
        args, kind = dict(wire.args), payload.buffer
        self._codec, self._way = codec(wire.name, args), way(wire.name, args)
        self._whole = profile.bytes_of(replace(payload, part=0, parts=1, width=1))
        buffers = sum(profile.buckets[b].buffer_bytes for b in payload.buckets)
        buffers = buffers if kind == "param" else 0
        held = payload.slice_of(self._whole - buffers)
        self._numbers = held.stop - held.start
        last = payload.part + payload.width == payload.parts
        self._plain = buffers if last else 0  # running statistics go with the last slice

    @property
    def code_bytes(self) -> int:
        """Bytes of one rank's codes, and of what is not encoded."""
        return self._codec.bytes_of(-(-self._numbers // ELEMENT_BYTES)) + self._plain

    @property
    def bytes(self) -> int:
        """Bytes of the all-reduce that puts as many on the link."""
        if self._way == "gather" and self._verb != "send":
            return self._profile.world_size * self.code_bytes // 2
        return self.code_bytes

    def seconds(self, link: str) -> float:
        """Of the message alone on its link."""
        if not self._numbers + self._plain:
            return 0.0
        verb: Verb = self._verb
        size = self.code_bytes
        if self._way == "gather" and verb != "send":
            verb, size = "all_gather", self._profile.world_size * size
        sent_s = self._profile.message_s(self._holding(size), link, verb)
        more_s = (self._codec.rounds - 1) * self._profile.link(link).latency_s
        return sent_s + more_s + self._coding_s("send" if verb == "send" else self._way)

    def sending_s(self, link: str) -> float:
        """Processor time that compute lacks."""
        facts = self._profile.link(link)
        if not (facts.cpu_s_per_message or facts.cpu_s_per_byte):
            return 0.0
        verb: Verb = "send" if self._verb == "send" else "all_reduce"
        size = self.bytes
        sent_s = self._profile.sending_s(self._holding(size), link, verb) if size else 0.0
        # The sender of a send encodes, and who receives it decodes.
        return sent_s + self._coding_s("encode" if verb == "send" else self._way)

    def _coding_s(self, via: str) -> float:
        return coding_s_per_byte(self._profile, self._codec, via) * self._numbers

    def _holding(self, size: int) -> Payload:
        """The payload, as large as so many bytes."""
        return replace(self._payload, part=0, parts=self._whole, width=size)


def coding_s_per_byte(profile: Profile, used: Codec, via: str) -> float:
    """Seconds of encoding and decoding per byte of the numbers, on every rank: of an average by
    `way`, of a "send" on its two ranks together, or of an "encode" alone."""
    speed = profile.codec_speed(used.name)
    encode_s, decode_s = speed.encode_s_per_byte, speed.decode_s_per_byte
    if via == "encode":
        return encode_s
    if via == "gather":
        return encode_s + profile.world_size * decode_s
    if via == "scatter":
        return encode_s * (1 + 1 / profile.world_size) + 2 * decode_s
    return encode_s + decode_s


def costed(profile: Profile, wire: Wire, *, sends: bool = False) -> Profile:
    """The profile of links over which messages take as long as they do over a wire: what planners
    that know nothing of wires plan with. Of codecs whose bytes are not in proportion to the
    numbers, those of the buckets count. Either averages are right, or what is sent from rank to
    rank."""
    used = codec(wire.name, dict(wire.args))
    via = "send" if sends else way(wire.name, dict(wire.args))
    links = [_costed(profile, link, used, via) for link in profile.links]
    both = {old.name: (old, new) for old, new in zip(profile.links, links, strict=True)}
    coding_s = coding_s_per_byte(profile, used, via)

    def given_s(name: str, seconds: float, size_bytes: int) -> float:
        """Of a measured bucket: what it takes beyond its latency shrinks as its bytes do."""
        old, new = both[name]
        least_s = min(old.latency_s, seconds)
        first_s = max(least_s + new.latency_s - old.latency_s, 0.0)
        shrunk = old.bytes_per_s * (1 / new.bytes_per_s - coding_s)
        return first_s + (seconds - least_s) * shrunk + coding_s * size_bytes

    buckets = tuple(
        replace(
            b,
            communication_s={n: given_s(n, s, b.size_bytes) for n, s in b.communication_s.items()},
        )
        for b in profile.buckets
    )
    return replace(profile, links=tuple(links), buckets=buckets)


def _costed(profile: Profile, link: Link, used: Codec, via: str) -> Link:
    sizes = [b.size_bytes for b in profile.buckets if b.size_bytes]
    if not sizes:  # nothing is sent, so nothing is encoded
        return link
    codes = sum(used.bytes_of(-(-size // ELEMENT_BYTES)) for size in sizes)
    share = codes / sum(sizes)
    coding_s = busy_s = coding_s_per_byte(profile, used, via)
    if via == "send":  # a send takes a share of what an all-reduce would
        coding_s *= profile.sent_per_s(link.name) / link.bytes_per_s
        busy_s = 2 * coding_s_per_byte(profile, used, "encode")
    latency_s, rate, fewer = link.latency_s, link.bytes_per_s, 1.0
    if via == "gather":
        latency_s, rate = link.halves.get("all_gather", (latency_s, 2 * rate))
        share, fewer = share * profile.world_size, 0.5
    latency_s += (used.rounds - 1) * link.latency_s
    takes_time = bool(link.cpu_s_per_message or link.cpu_s_per_byte)
    small: dict[int, float] = {}
    for size, seconds in link.small:
        dense = round(size / share) if share else size
        small[dense] = max(small.get(dense, 0.0), seconds * fewer)
    return replace(
        link,
        latency_s=latency_s,
        bytes_per_s=1 / max(share / rate + coding_s, 1e-30),
        small=tuple(sorted(small.items())),
        halves={},
        cpu_s_per_byte=link.cpu_s_per_byte * share * fewer + busy_s * takes_time,
    )


def kind_of(payload: Payload, kind: Kind) -> Payload:
    """A payload of some buffer as one of the kinds that a profile knows."""
    return payload if payload.buffer == kind else replace(payload, buffer=kind)
