"""Speeds of codecs: seconds of encoding and decoding, per byte of the numbers and per message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import fmean, median

import torch

from offbeat.core.buckets.random_states import generator, normal
from offbeat.core.codecs import WIRES, Codec, codec
from offbeat.core.codecs.average import Part, Settings, average
from offbeat.core.codecs.cost import Encoded
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.measuring import effort
from offbeat.core.plan import Payload, Wire
from offbeat.core.profile import Bucket, CodecSpeed, Profile
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU, Device

FEW = 1 << 10  # numbers in a small message
ALONE = Collectives({"all_reduce": lambda _: None, "all_gather": lambda _: None}, lambda *_: None)


def measure_codecs(cluster: Cluster, profile: Profile) -> Profile:
    """Return the profile with rank 0's speeds of all codecs. Takes less than a second.

    All ranks must call it at the same time. Ranks that share processors also encode at the same
    time in training.
    """
    control = cluster.control
    measured = codec_speeds(cluster.where, cluster.device)
    speeds = [CodecSpeed(**speed) for speed in control.share_first([asdict(s) for s in measured])]
    if control.world_size > 1:
        more_s = _overhead_s(cluster, replace(profile, codecs=tuple(speeds)))
        speeds = [replace(s, s_per_message=s.s_per_message + more_s) for s in speeds]
    return replace(profile, codecs=tuple(speeds))


def _overhead_s(cluster: Cluster, profile: Profile) -> float:
    """Return the seconds of a small message beyond the predicted seconds of its parts.

    They are due to cold caches after a pause, and to waits for the slowest rank in each round of
    collectives. The result is per round, averaged over both kinds of average ("gather" and
    "scatter"). The longest message is left out.
    """
    name, extra_s = profile.default_link.name, []
    act = cluster.links[name].collectives
    act = act if act.levels is None else act.levels.column
    small = replace(profile, buckets=(Bucket("numbers", 0.0, 0.0, 4 * FEW),))
    used, x = codec("int4", {}), normal(FEW, generator()).to(cluster.where)
    for via, rounds in (("gather", 1), ("scatter", 2)):
        how, times = Settings(used, via, 0, keeps=True), []
        for _ in range(effort.current().codec_messages):
            time.sleep(effort.current().codec_rest_s)
            start = time.perf_counter()
            average(Part(x.clone(), x[:0], {}), how, act)
            cluster.device.finish()
            times.append(time.perf_counter() - start)
        # The rank that began last has not waited for others, so take the minimum over ranks.
        least = sorted(map(min, zip(*cluster.control.gather(times), strict=True)))
        wire = Wire("int4", (("via", via),))
        expected_s = Encoded(small, Payload("grad", range(1)), wire, "all_reduce").seconds(name)
        extra_s.append((fmean(least[:-1]) - expected_s) / rounds)
    return max(0.0, fmean(extra_s))


def codec_speeds(where: torch.device, device: Device) -> tuple[CodecSpeed, ...]:
    """Return the speed of every codec on this rank alone, without any collective."""
    clock = Clock(device)
    # The speed hardly depends on the settings.
    found = [_speed(codec(name, cls.example), where, clock) for name, cls in WIRES.items()]
    slower = clock.slower()
    return tuple(
        CodecSpeed(name, *(slower * max(seconds, 0.0) for seconds in taken))
        for name, taken in zip(WIRES, found, strict=True)
    )


def _speed(used: Codec, where: torch.device, clock: Clock) -> tuple[float, ...]:
    """Return the fields of a `CodecSpeed` in seconds, from a small and a large message of a rank
    alone."""
    how = effort.current()
    small, large = (
        (4 * n, *_codec_seconds(used, normal(n, generator()).to(where), clock, repeats))
        for n, repeats in zip((FEW, how.codec_numbers), how.codec_repeats, strict=True)
    )
    (few, encode_s, decode_s, all_s), (many, _, large_decode_s, large_all_s) = small, large
    per_byte_s = (large_decode_s - decode_s) / (many - few)
    # Other work per byte is attributed to encoding.
    other_s = (large_all_s - all_s) / (many - few) - per_byte_s
    passes_s = max(encode_s - few * other_s, 0.0), max(decode_s - few * per_byte_s, 0.0)
    rest_s = all_s - few * (other_s + per_byte_s) - sum(passes_s)
    return other_s, per_byte_s, *passes_s, rest_s


def _codec_seconds(
    used: Codec, x: torch.Tensor, clock: Clock, repeats: int
) -> tuple[float, float, float]:
    """Return seconds to encode, to decode, and of a whole message.

    For a linear codec, seconds to encode and to decode are 0: the message sums encoded values.
    """
    given, found, memory = x.clone(), torch.zeros_like(x), dict[str, object]()
    how = Settings(used, "reduce" if used.linear else "gather", 0, keeps=True)

    def whole() -> None:
        average(Part(given.copy_(x), x[:0], memory, found), how, ALONE)

    all_s = clock(whole, repeats)
    if used.linear:
        return 0.0, 0.0, all_s
    codes, way = x.new_empty(used.bytes_of(x.numel()), dtype=torch.uint8), code(used)
    encode_s = clock(lambda: way.encode(given.copy_(x), codes), repeats)
    return encode_s, clock(lambda: way.add(codes, found), repeats), all_s


class Clock:
    """Measures the median seconds of a call.

    On the host it measures the processor time of the thread, which other processes do not disturb,
    and records the ratio of elapsed time to processor time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._read = time.thread_time if isinstance(device, CPU) else time.perf_counter
        self._ratios: list[float] = []

    def __call__(self, work: Callable[[], object], repeats: int) -> float:
        work()
        times, begin, own = [], time.perf_counter(), self._read()
        for _ in range(repeats):
            self._device.finish()
            start = self._read()
            work()
            self._device.finish()
            times.append(self._read() - start)
        took_s, own_s = time.perf_counter() - begin, self._read() - own
        self._ratios.append(took_s / max(own_s, 1e-9))
        return median(times)

    def slower(self) -> float:
        """Return the median ratio of elapsed time to processor time, at least 1."""
        return max(1.0, median(self._ratios))
