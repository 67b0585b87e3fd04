"""Speeds of codecs: what encoding and decoding take, per byte of the numbers and per message."""

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
from offbeat.core.plan import Payload, Wire
from offbeat.core.profile import Bucket, CodecSpeed, Profile
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU, Device

FEW, MANY = 1 << 10, 1 << 18  # numbers
REPEATS = {FEW: 25, MANY: 5}
MESSAGES, REST_S = 9, 0.004
SETTINGS = {"topk": {"fraction": 0.01}, "randomk": {"fraction": 0.01}, "powersgd": {"rank": 4}}
"""What codecs that need settings are measured with; their speed hardly depends on them."""
ALONE = Collectives({"all_reduce": lambda _: None, "all_gather": lambda _: None}, lambda *_: None)


def measure_codecs(cluster: Cluster, profile: Profile) -> Profile:
    """The profile with the speeds of all codecs, rank 0's; less than a second. All ranks must call
    it at once: if they share processors, all of them encode at once in training, too."""
    control = cluster.control
    mine = codec_speeds(cluster.where, cluster.device)
    speeds = [CodecSpeed(**speed) for speed in control.gather([asdict(s) for s in mine])[0]]
    if control.world_size > 1:
        more_s = _more_s(cluster, replace(profile, codecs=tuple(speeds)))
        speeds = [replace(s, s_per_message=s.s_per_message + more_s) for s in speeds]
    return replace(profile, codecs=tuple(speeds))


def _more_s(cluster: Cluster, profile: Profile) -> float:
    """What a small message takes beyond all its parts: caches are cold after a rest, and each part
    waits for the slowest rank. Of both ways to go round; the longest of some does not count."""
    name, found = profile.default_link.name, []
    small = replace(profile, buckets=(Bucket("numbers", 0.0, 0.0, 4 * FEW),))
    used, x = codec("int4", {}), normal(FEW, generator()).to(cluster.where)
    for via, rounds in (("gather", 1), ("scatter", 2)):
        how, times = Settings(used, via, 0, keeps=True), []
        for _ in range(MESSAGES):
            time.sleep(REST_S)
            start = time.perf_counter()
            average(Part(x.clone(), x[:0], {}), how, cluster.links[name].collectives)
            cluster.device.finish()
            times.append(time.perf_counter() - start)
        # The last rank to come has not waited for others.
        least = sorted(map(min, zip(*cluster.control.gather(times), strict=True)))
        wire = Wire("int4", (("via", via),))
        expected_s = Encoded(small, Payload("grad", range(1)), wire, "all_reduce").seconds(name)
        found.append((fmean(least[:-1]) - expected_s) / rounds)
    return max(0.0, fmean(found))


def codec_speeds(where: torch.device, device: Device) -> tuple[CodecSpeed, ...]:
    """Of every codec, without what a message takes in a group."""
    clock = Clock(device)
    found = [_speed(codec(name, SETTINGS.get(name, {})), where, clock) for name in WIRES]
    slower = clock.slower()
    return tuple(
        CodecSpeed(name, *(slower * max(seconds, 0.0) for seconds in taken))
        for name, taken in zip(WIRES, found, strict=True)
    )


def _speed(used: Codec, where: torch.device, clock: Clock) -> tuple[float, ...]:
    """The seconds of a `CodecSpeed`, from a small and a large message of a rank alone."""
    small, large = (
        (4 * n, *_taken(used, normal(n, generator()).to(where), clock)) for n in (FEW, MANY)
    )
    (few, encode_s, decode_s, all_s), (many, _, large_decode_s, large_all_s) = small, large
    per_byte_s = (large_decode_s - decode_s) / (many - few)
    # What else is done with the numbers counts with encoding.
    other_s = (large_all_s - all_s) / (many - few) - per_byte_s
    passes_s = max(encode_s - few * other_s, 0.0), max(decode_s - few * per_byte_s, 0.0)
    rest_s = all_s - few * (other_s + per_byte_s) - sum(passes_s)
    return other_s, per_byte_s, *passes_s, rest_s


def _taken(used: Codec, x: torch.Tensor, clock: Clock) -> tuple[float, float, float]:
    """Seconds to encode, to decode, and of a whole message. What is linear does it in one."""
    given, found, memory = x.clone(), torch.zeros_like(x), dict[str, object]()
    how = Settings(used, "reduce" if used.linear else "gather", 0, keeps=True)

    def whole() -> None:
        average(Part(given.copy_(x), x[:0], memory, found), how, ALONE)

    repeats = REPEATS[x.numel()]
    all_s = clock(whole, repeats)
    if used.linear:
        return 0.0, 0.0, all_s
    codes, way = x.new_empty(used.bytes_of(x.numel()), dtype=torch.uint8), code(used)
    encode_s = clock(lambda: way.encode(given.copy_(x), codes), repeats)
    return encode_s, clock(lambda: way.add(codes, found), repeats), all_s


class Clock:
    """Medians of some calls. On the host the thread's own time, which others do not disturb, and
    besides how much longer it really took."""

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
        """Time that passed, over the thread's own; at least 1."""
        return max(1.0, median(self._ratios))
