"""Speeds of codecs: what one core takes to encode and to decode a byte of the numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from offbeat.numerics.codecs import WIRES, Codec, codec
from offbeat.profile import CodecSpeed
from offbeat.transport.codes.average import Part, Settings, average
from offbeat.transport.codes.codes import code
from offbeat.transport.collectives import Collectives
from offbeat.transport.device import CPU, Device

ELEMENTS = 1 << 18
REPEATS = 3
SETTINGS = {"topk": {"fraction": 0.01}, "randomk": {"fraction": 0.01}, "powersgd": {"rank": 4}}
"""What codecs that need settings are measured with; their speed hardly depends on them."""


def codec_speeds(where: torch.device, device: Device) -> tuple[CodecSpeed, ...]:
    """Of every codec; all together a tenth of a second."""
    x = torch.randn(ELEMENTS, device=where)
    return tuple(_speed(codec(name, SETTINGS.get(name, {})), x, device) for name in WIRES)


def _speed(used: Codec, x: torch.Tensor, device: Device) -> CodecSpeed:
    if used.linear:  # encoded and decoded in one
        alone = Collectives({"all_reduce": lambda _: None}, lambda *_: None)
        memory: dict[str, object] = {}

        def both() -> None:
            part = Part(x.clone(), x[:0], memory)
            average(part, Settings(used, "reduce", 0, keeps=True), alone)

        return CodecSpeed(used.name, _seconds(both, device) / x.nbytes, 0.0)
    codes = x.new_empty(used.bytes_of(x.numel()), dtype=torch.uint8)
    given, found, way = x.clone(), torch.zeros_like(x), code(used)

    def encode() -> None:
        given.copy_(x)
        way.encode(given, codes)

    encode_s = _seconds(encode, device)
    decode_s = _seconds(lambda: way.add(codes, found), device)
    return CodecSpeed(used.name, encode_s / x.nbytes, decode_s / x.nbytes)


def _seconds(work: Callable[[], None], device: Device) -> float:
    """Median of some calls, after one that does not count. On the host the thread's own time:
    ranks that share the machine measure at once."""
    clock = time.thread_time if isinstance(device, CPU) else time.perf_counter
    work()
    times = []
    for _ in range(REPEATS):
        device.finish()
        start = clock()
        work()
        device.finish()
        times.append(clock() - start)
    return median(times)
