"""Profile for planners that plan plain messages where the plan sends encoded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import ceil

from offbeat.core.codecs import Codec, codec, way
from offbeat.core.codecs.cost import coding_s
from offbeat.core.plan import Wire
from offbeat.core.profile import Link, Profile


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
    codes = sum(used.bytes_of(ceil(size / profile.element_bytes)) for size in sizes)
    share = codes / sum(sizes)
    first_s, per_byte_s = busy_first_s, busy_s = coding_s(profile, used, via)
    least_per_byte_s = per_byte_s
    pair = link.pair_bytes_per_s
    if pair is not None:
        pair = 1 / max(share / pair + per_byte_s, 1e-30)
    if via == "send":  # the link model derives a send's time as a share of an all-reduce's time
        steps = 2 * max(profile.world_size - 1, 1)
        first_s, least_per_byte_s = steps * first_s, steps * per_byte_s
        per_byte_s *= profile.send_bytes_per_s(link.name) / link.bytes_per_s
        busy_first_s, busy_s = (2 * s for s in coding_s(profile, used, "encode"))
    latency_s, rate = link.latency_s, link.bytes_per_s
    small: Iterable[tuple[int, float]] = link.small
    if via in ("gather", "scatter"):
        latency_s, rate = link.half("all_gather", profile.world_size)
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
        pair_bytes_per_s=pair,
        halves={},
        small_halves={},
        after_pause=tuple((round(size / alike), s) for size, s in link.after_pause if alike),
        cpu_s_per_message=link.cpu_s_per_message * messages + busy_first_s * takes_time,
        cpu_s_per_byte=link.cpu_s_per_byte * alike + busy_s * takes_time,
    )
