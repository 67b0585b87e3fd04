"""Codecs with settings, and profiles of a small model, for tests of codecs."""

from __future__ import annotations

from typing import Any

from offbeat.core.codecs import WIRES, Codec, codec
from offbeat.profile import Bucket, Link, Profile

SETTINGS: dict[str, dict[str, Any]] = {
    name: {"fraction": 0.1} for name, cls in WIRES.items() if "fraction" in cls.settings
} | {"powersgd": {"rank": 2}}
PLAIN = [name for name, cls in WIRES.items() if not cls.linear]
LINEAR = [name for name, cls in WIRES.items() if cls.linear]
SIZES = (300, 7, 513)


def codec_of(name: str) -> Codec:
    return codec(name, SETTINGS.get(name, {}))


def profile_of(sizes: tuple[int, ...] = SIZES, ranks: int = 2, **more: Any) -> Profile:
    buckets = [Bucket(f"b{i}", 0.01, 0.02, 4 * n) for i, n in enumerate(sizes)]
    links = (Link("net", 1e-3, 1e5), Link("aux", 1e-3, 1e5))
    return Profile(tuple(buckets), links, ranks, update_s=0.001, **more)
