"""Predicted time of encoded messages.

The link's thread encodes and decodes, so a message's time includes both. On links whose messages
take processor time from compute, encoding and decoding do so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from offbeat.core.codecs import Codec, codec, way
from offbeat.core.plan import Payload, Verb, Wire
from offbeat.core.profile import Link, Profile

ELEMENT_BYTES = 4  # bytes of an encoded element; a profile holds no dtypes


class Encoded:
    """Sizes and times of one encoded message: a payload of a profile over a wire."""

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
    def bytes(self) -> int:
        """Return the bytes of the plain all-reduce that loads the link as much as this message."""
        whole = sum(self._rounds)
        return whole // 2 if self._gathers else whole

    @property
    def _gathers(self) -> bool:
        return self._verb != "send" and self._way != "reduce"

    @property
    def _rounds(self) -> list[int]:
        """Return the bytes of the message's successive collectives.

        `gather` and `scatter` use all-gathers; the exchange of `scatter` costs as much as one. Each
        rank sends all its unencoded bytes with the last all-gather. Any other message sends them
        with its first collective.
        """
        ranks, plain = self._profile.world_size, self._plain
        codes = self._codec.bytes_of(-(-self._numbers // ELEMENT_BYTES))
        if not self._gathers:
            count = 1 if self._verb == "send" else self._codec.rounds
            return [codes // count + plain, *[codes // count] * (count - 1)]
        return (
            [ranks * (codes + plain)] if self._way == "gather" else [codes, codes + ranks * plain]
        )

    def seconds(self, link: str) -> float:
        """Return the seconds of the message on an idle link, with encoding and decoding."""
        if not self._numbers + self._plain:
            return 0.0
        sent_s = self._sum_rounds(self._profile.message_s, link)
        return sent_s + self._coding_s("send" if self._verb == "send" else self._way)

    def transfer_s(self, link: str) -> float:
        """Return the part of `seconds` in which the message uses the rate of the link."""
        if not self._numbers + self._plain:
            return 0.0
        return self._sum_rounds(self._profile.message_transfer_s, link)

    def _sum_rounds(self, seconds: Callable[[Payload, str, Verb], float], link: str) -> float:
        verb: Verb = "all_gather" if self._gathers else self._verb
        return sum(seconds(self._resize(size), link, verb) for size in self._rounds)

    def sending_s(self, link: str) -> float:
        """Return the processor seconds that the message takes from compute."""
        facts = self._profile.link(link)
        if not (facts.cpu_s_per_message or facts.cpu_s_per_byte):
            return 0.0
        verb: Verb = "send" if self._verb == "send" else "all_reduce"
        sizes = [self.bytes] if self._gathers else self._rounds
        sent_s = sum(
            self._profile.sending_s(self._resize(size), link, verb) for size in sizes if size
        )
        # The sender of a send encodes; the receiver decodes.
        return sent_s + self._coding_s("encode" if verb == "send" else self._way)

    def _coding_s(self, via: str) -> float:
        per_message_s, per_byte_s = coding_s(self._profile, self._codec, via)
        return per_message_s * bool(self._numbers) + per_byte_s * self._numbers

    def _resize(self, size: int) -> Payload:
        """Return the payload with its size set to `size` bytes."""
        return replace(self._payload, part=0, parts=self._whole, width=size)


def coding_s(profile: Profile, used: Codec, via: str) -> tuple[float, float]:
    """Return the coding seconds per message and per byte of the numbers.

    Args:
        profile: profile with the codec's measured speed.
        used: codec.
        via: "gather", "scatter" or "reduce": encoding and decoding of an average, on each rank.
            "send": encoding plus decoding of a send, on its two ranks together. "encode": encoding.
    """
    speed, ranks = profile.codec_speed(used.name), profile.world_size
    # Each rank of a replica encodes its own shard of a message.
    owners = 1 if profile.inside is None else min(profile.topology)
    rounds = 2 if via == "scatter" else 1
    # Number of times that all numbers are encoded and decoded. One pass processes the codes of all
    # ranks, or the shards for all ranks.
    encoded = 1 + 1 / ranks if via == "scatter" else 1
    decoded = {"encode": 0, "gather": ranks, "scatter": 2}.get(via, 1)
    decodes_s = speed.decode_s_per_pass if decoded else 0.0
    per_round_s = speed.s_per_message + speed.encode_s_per_pass + decodes_s
    per_byte_s = encoded * speed.encode_s_per_byte + decoded * speed.decode_s_per_byte
    return rounds * per_round_s, per_byte_s / owners


def profile_for_wire(profile: Profile, wire: Wire, *, sends: bool = False) -> Profile:
    """Return a profile whose plain messages take as long as encoded messages of `profile` do.

    Planners without support for wires plan with this profile. If a codec's bytes are not
    proportional to the number of elements, the ratio for the profile's buckets is used.

    Args:
        profile: measured profile.
        wire: codec and its settings.
        sends: if true, the profile is exact for sends and approximate for averages; if false, the
            reverse.
    """
    if not any(b.size_bytes for b in profile.buckets):  # nothing is sent, so nothing is encoded
        return profile
    used = codec(wire.name, dict(wire.args))
    via = "send" if sends else way(wire.name, dict(wire.args))
    links = [_link_for_wire(profile, link, used, via) for link in profile.links]
    both = {old.name: (old, new) for old, new in zip(profile.links, links, strict=True)}
    _, per_byte_s = coding_s(profile, used, via)

    def bucket_s(size_bytes: int, name: str, seconds: float) -> float:
        """Return the seconds of a measured bucket over the wire.

        They are the latency over the wire, the time beyond the latency scaled by the ratio of the
        bytes, and the coding time.
        """
        if name not in both:
            return seconds
        old, new = both[name]
        least_s = min(old.latency_s, seconds)
        first_s = max(least_s + new.latency_s - old.latency_s, 0.0)
        shrunk = old.bytes_per_s * (1 / new.bytes_per_s - per_byte_s)
        return first_s + (seconds - least_s) * shrunk + per_byte_s * size_bytes

    buckets = tuple(b.with_given_times(partial(bucket_s, b.size_bytes)) for b in profile.buckets)
    return replace(profile, links=tuple(links), buckets=buckets)


def _link_for_wire(profile: Profile, link: Link, used: Codec, via: str) -> Link:
    sizes = [b.size_bytes for b in profile.buckets if b.size_bytes]
    codes = sum(used.bytes_of(-(-size // ELEMENT_BYTES)) for size in sizes)
    share = codes / sum(sizes)
    first_s, per_byte_s = busy_first_s, busy_s = coding_s(profile, used, via)
    least_per_byte_s = per_byte_s
    if via == "send":  # the link model derives a send's time as a share of an all-reduce's time
        steps = 2 * max(profile.world_size - 1, 1)
        first_s, least_per_byte_s = steps * first_s, steps * per_byte_s
        per_byte_s *= profile.send_bytes_per_s(link.name) / link.bytes_per_s
        busy_first_s, busy_s = (2 * s for s in coding_s(profile, used, "encode"))
    latency_s, rate = link.latency_s, link.bytes_per_s
    small: Iterable[tuple[int, float]] = link.small
    if via in ("gather", "scatter"):
        latency_s, rate = link.halves.get("all_gather", (latency_s, 2 * rate))
        small = link.small_halves.get("all_gather") or [(size, s / 2) for size, s in small]
    rounds = {"scatter": 2, "reduce": used.rounds}.get(via, 1)
    # Bytes of one round, and bytes of the equivalent all-reduce, both per byte of the numbers.
    each = {"gather": share * profile.world_size, "scatter": share}.get(via, share / rounds)
    alike = rounds * each / (2 if via in ("gather", "scatter") else 1)
    messages = 1 if via == "scatter" else rounds
    takes_time = bool(link.cpu_s_per_message or link.cpu_s_per_byte)
    floor: dict[int, float] = {}
    least = [(round(size / each) if each else size, seconds) for size, seconds in small]
    if least and sum(sizes) > least[-1][0]:
        least.append((sum(sizes), least[-1][1]))  # coding time still grows with the size
    for size, seconds in least:
        least_s = rounds * seconds + first_s + least_per_byte_s * size
        floor[size] = max(floor.get(size, 0.0), least_s)
    return replace(
        link,
        latency_s=rounds * latency_s + first_s,
        bytes_per_s=1 / max(rounds * each / rate + per_byte_s, 1e-30),
        small=tuple(sorted(floor.items())),
        halves={},
        small_halves={},
        after_pause=tuple((round(size / alike), s) for size, s in link.after_pause if alike),
        cpu_s_per_message=link.cpu_s_per_message * messages + busy_first_s * takes_time,
        cpu_s_per_byte=link.cpu_s_per_byte * alike + busy_s * takes_time,
    )
