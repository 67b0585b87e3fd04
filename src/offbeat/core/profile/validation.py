"""Validation of the fields of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from offbeat.core.plan import CHANNEL, INSIDE

if TYPE_CHECKING:
    from offbeat.core.profile.facts import Profile
    from offbeat.core.profile.records import Bucket, Contention, Link

HALVES = ("reduce_scatter", "all_gather")
POSITIVE = ("bytes_per_s", "asked_rate_bps", "pair_bytes_per_s", "element_bytes")  # not 0


def validate(profile: Profile) -> None:  # noqa: C901
    """Raise if a field of a profile is out of range or contradicts another field.

    Raises:
        ValueError: the message names the first wrong field, its value and the relation it must
            meet.
    """
    if not isinstance(profile.world_size, int) or profile.world_size < 1:
        raise ValueError(f"world_size ({profile.world_size!r}) must be an integer of at least 1")
    for what, records in (("buckets", profile.buckets), ("links", profile.links)):
        if not records:
            raise ValueError(f"{what} ([]) must not be empty")
    _require_unique("link", [link.name for link in profile.links])
    _validate_nodes(profile)
    for link in profile.all_links:
        _validate_link(link)
    for contention in profile.contention:
        _validate_contention(contention, [link.name for link in profile.all_links])
    _require_unique("codec", [codec.name for codec in profile.codecs])
    for codec in profile.codecs:
        _validate_numbers(codec, f" of codec {codec.name!r}")
    for bucket in profile.buckets:
        _validate_bucket(bucket, {link.name for link in profile.all_links})
    _validate_numbers(profile)
    for name, values in (("rank_scale", profile.rank_scale), ("rank_jitter", profile.rank_jitter)):
        if values and len(values) != profile.world_size:
            raise ValueError(
                f"{name} ({len(values)} entries) must have one entry per rank "
                f"({profile.world_size})"
            )
        for rank, value in enumerate(values):
            _require_number(f"{name}[{rank}]", value, positive=name == "rank_scale")


def _validate_nodes(profile: Profile) -> None:
    """Raise ValueError if the ranks of replicas, or the link between them, are not consistent."""
    sizes, inside = profile.topology, profile.inside
    if not sizes:
        if inside is not None or profile.sharded:
            raise ValueError("topology (()) must be given where a replica has several ranks")
        return
    if len(sizes) != profile.world_size or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(
            f"topology ({sizes}) must be the number of ranks of each of {profile.world_size} "
            "replicas"
        )
    if profile.sharded and len(set(sizes)) > 1:
        raise ValueError(f"topology ({sizes}) of sharded replicas must be equal numbers of ranks")
    if (inside is None) != profile.sharded:
        raise ValueError(
            "inside must be the link between the ranks of a replica unless they are sharded"
        )
    if inside is not None and (
        inside.name != INSIDE or INSIDE in [link.name for link in profile.links]
    ):
        raise ValueError(
            f"link {INSIDE!r} must be the one between the ranks of a replica, and no other one"
        )
    if inside is not None and inside.after_pause:
        raise ValueError(
            f"after_pause ({inside.after_pause}) of link {INSIDE!r} must be empty: pauses count "
            "only between replicas"
        )


def _validate_link(link: Link) -> None:
    if CHANNEL in link.name:
        raise ValueError(f"link name ({link.name!r}) must not contain {CHANNEL!r}; rename it")
    if not isinstance(link.connections, int) or link.connections < 1:
        raise ValueError(
            f"connections of link {link.name!r} ({link.connections!r}) must be at least 1"
        )
    _validate_numbers(link, f" of link {link.name!r}")
    _validate_points("a small message", link.name, link.small)
    _validate_points("a message after a pause", link.name, link.after_pause)
    if any(size < 1 for size, _ in link.after_pause):
        raise ValueError(f"bytes after a pause of link {link.name!r} must be at least 1")
    for verb, small in link.small_halves.items():
        if verb not in HALVES:
            raise ValueError(
                f"small_halves[{verb!r}] of link {link.name!r} must be {' or '.join(HALVES)}"
            )
        _validate_points(f"a small {verb}", link.name, small)
    for verb, pair in link.halves.items():
        if verb not in HALVES or len(pair) != 2:
            raise ValueError(
                f"halves[{verb!r}] of link {link.name!r} must be reduce_scatter or all_gather "
                "with its latency_s and bytes_per_s"
            )
        _require_number(f"latency of {verb} of link {link.name!r}", pair[0])
        _require_number(f"rate of {verb} of link {link.name!r}", pair[1], positive=True)


def _validate_points(what: str, link: str, points: Sequence[tuple[int, float]]) -> None:
    for size, seconds in points:
        _require_number(f"bytes of {what} on link {link!r}", size)
        _require_number(f"seconds of {what} on link {link!r}", seconds)
    sizes = [size for size, _ in points]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"bytes of {what} on link {link!r} ({sizes}) must be ascending")


def _validate_contention(contention: Contention, links: Sequence[str]) -> None:
    if len(contention.links) != 2 or not set(contention.links) <= set(links):
        raise ValueError(
            f"contention ({contention.links}) must be between two of {', '.join(links)}"
        )
    if len(contention.speeds) != 2:
        raise ValueError(f"speeds ({contention.speeds}) of a contention must be one per link: 2")
    for link, speed in zip(contention.links, contention.speeds, strict=True):
        _require_number(f"speed of link {link!r} in a contention", speed, positive=True)


def _validate_bucket(bucket: Bucket, links: set[str]) -> None:
    _validate_numbers(bucket, f" of bucket {bucket.name!r}")
    if not isinstance(bucket.communication_s, Mapping):
        raise ValueError(
            f"communication_s of bucket {bucket.name!r} must map link names to seconds"
        )
    for link, seconds in bucket.communication_s.items():
        if link not in links:
            raise ValueError(
                f"communication_s of bucket {bucket.name!r} names the link {link!r}, "
                f"which must be one of {', '.join(sorted(links))}"
            )
        _require_number(f"communication_s[{link!r}] of bucket {bucket.name!r}", seconds)


def _validate_numbers(record: Any, of: str = "") -> None:
    """Raise ValueError unless all fields of a record that are numbers have valid values."""
    for own in fields(record):
        value = getattr(record, own.name)
        if own.type in ("int", "float") or (own.type == "float | None" and value is not None):
            _require_number(f"{own.name}{of}", value, positive=own.name in POSITIVE)


def _require_unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} name ({name!r}) must be unique")


def _require_number(name: str, value: Any, *, positive: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < 0 or (positive and value == 0):
        raise ValueError(
            f"{name} ({value!r}) must be a finite number {'above' if positive else 'of at least'} 0"
        )
