"""Predicted time of encoded messages.

The link's thread encodes and decodes, so a message's time includes both. On links whose messages
take processor time from compute, encoding and decoding do so too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from offbeat.core.codecs import Codec, codec, way
from offbeat.core.plan import Payload, Verb, Wire
from offbeat.core.profile import Profile

ELEMENT_BYTES = 4  # bytes of an element of float32, in which codecs are measured


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
        codes = self._codec.bytes_of(ceil(self._numbers / self._profile.element_bytes))
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
    per_byte_s *= ELEMENT_BYTES / profile.element_bytes
    return rounds * per_round_s, per_byte_s / owners
