"""Codecs on the averages of strategies: the settings, the plan whose messages are encoded, and the
profile whose plain messages take as long."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar

from offbeat.core.codecs import WIRES, Codec, PowerSGD, Sign, codec, way
from offbeat.core.codecs.cost import Encoded, coding_s
from offbeat.core.codecs.powersgd import matrix_shape
from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Buffer, Fact, Kind, Payload, Plan, Transfer, Wire
from offbeat.core.profile import Link, Profile
from offbeat.core.rules import SETTINGS
from offbeat.core.strategy.interface import Planned, Strategy, require_choice, synchronous_bound_s
from offbeat.strategies.equations import Equations, synchronous

NONE = "none"
SUGGESTED_WIRES = ("int8", "int4")  # codecs that advice compares
ANCHOR = "anchor"


@dataclass(frozen=True)
class Wired(Planned):
    """Base class of strategies that average gradients or parameters, with settings for a codec.

    They use collectives; if `sends` is set, messages go from rank to rank.
    """

    wire: str = field(default=NONE, kw_only=True)
    """Codec of gradients, or of the change of parameters since their last average: `none`, `bf16`,
    `fp16`, `int8`, `int4`, `sign`, `topk:0.01`, `randomk:0.01`, `powersgd:4`."""
    error_feedback: bool = field(default=True, kw_only=True)
    """Whether the encoding error is stored and added to the next message."""

    sends: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        used = codec_of(self.wire)
        require_choice("error_feedback", self.error_feedback, (True, False))
        if self.sends and used is not None and used.linear:
            raise ValueError(
                f"wire ({self.wire!r}) can only be all-reduced, and {self.name} sends from rank to "
                "rank; use int4, or topk:0.01 for fewer bytes"
            )
        if isinstance(used, Sign) and not self.error_feedback:
            warnings.warn(
                f"wire ({self.wire!r}) without error_feedback loses all but one bit of every "
                "number for good, and need not converge; leave error_feedback at True",
                stacklevel=3,
            )

    @property
    def is_lossy(self) -> bool:
        return self.wire != NONE

    def costed(self, profile: Profile) -> Profile:
        wire = self._wire(profile)
        return profile if wire is None else profile_for_wire(profile, wire, sends=self.sends)

    def encoded(self, plan: Plan, profile: Profile) -> Plan:
        wire = self._wire(profile)
        if wire is None:
            return plan
        return with_wire(plan, wire, profile, error_feedback=self.error_feedback)

    def _wire(self, profile: Profile) -> Wire | None:
        """Return the codec with the collective that is faster for the largest bucket; None without
        one."""
        used = codec_of(self.wire)
        if used is None or profile.world_size == 1:
            return None
        wire = Wire(used.name, tuple(codec_arguments(self.wire).items()))
        if self.sends:
            return wire
        bucket = max(range(len(profile.buckets)), key=lambda b: profile.buckets[b].size_bytes)
        largest = Payload("grad", range(bucket, bucket + 1))
        return fastest(largest, wire, profile, profile.default_link.name)


def with_wires(strategies: Iterable[Wired]) -> Iterator[Wired]:
    """Yield the strategies, first as they are and then with each suggested codec."""
    plain = list(strategies)
    yield from plain
    for wire in SUGGESTED_WIRES:
        yield from (replace(strategy, wire=wire) for strategy in plain)


class Synchronous(Wired):
    """Base class of strategies that average all gradients in every iteration, as DDP does."""

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return (cls(),)

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile, fused=True)


def with_wire(plan: Plan, wire: Wire, profile: Profile, *, error_feedback: bool = True) -> Plan:
    """Return the plan with every all-reduce and send of gradients or parameters encoded.

    Parameters are sent as their change against an anchor. Optimizer state, halves of all-reduces,
    and parameters that a rank receives from different ranks are not encoded.

    Args:
        plan: plan to change.
        wire: codec and its settings.
        profile: costs of messages.
        error_feedback: whether encoding errors are stored and added to the next message.

    Raises:
        ValueError: no message is large enough for the codec.
    """
    buffers: dict[str, Buffer] = {}
    transfers = tuple(
        _encode_transfer(t, wire, plan, profile, buffers, error_feedback) for t in plan.transfers
    )
    if not buffers and error_feedback:
        return plan
    _require_smaller(wire, transfers, profile)
    return replace(
        plan,
        transfers=transfers,
        applies=tuple(_move_anchor(plan, transfers)),
        buffers=(*plan.buffers, *buffers.values()),
        facts=(*_add_memory(plan.facts, buffers, profile), *_wire_facts(wire, transfers, profile)),
    )


def _encode_transfer(
    t: Transfer,
    wire: Wire,
    plan: Plan,
    profile: Profile,
    buffers: dict[str, Buffer],
    error_feedback: bool,
) -> Transfer:
    kind = plan.all_buffers[t.payload.buffer].kind
    if t.verb == "send":
        return _encode_send(t, wire, plan, buffers, error_feedback)
    if t.verb != "all_reduce" or kind == "state":
        return t
    encoded = fastest(replace(t.payload, buffer=kind), wire, profile, t.link)
    if error_feedback:
        name = _residual_name(kind, t.link, plan)
        buffers[name] = Buffer(name, kind)
        encoded = replace(encoded, error=name)
    if kind == "param":
        name = f"{ANCHOR} of wire" if ANCHOR in plan.all_buffers else ANCHOR
        buffers[name] = Buffer(name, start="param")
        encoded = replace(encoded, anchor=name)
    return replace(t, wire=encoded)


def _encode_send(
    t: Transfer, wire: Wire, plan: Plan, buffers: dict[str, Buffer], error_feedback: bool
) -> Transfer:
    """Return an encoded send.

    For gradients, the sender stores the encoding error. For parameters, an anchor at the sender
    holds the parameters that the receiver has.
    """
    if t.payload.buffer == "param" and _is_one_to_one(t, plan):
        buffers[ANCHOR] = Buffer(ANCHOR, start="param")
        return replace(t, wire=replace(wire, anchor=ANCHOR))
    if t.payload.buffer != "grad":
        return t
    if error_feedback:
        name = "residual_grad"
        buffers[name] = Buffer(name, "grad")
        wire = replace(wire, error=name)
    return replace(t, wire=wire)


def _is_one_to_one(t: Transfer, plan: Plan) -> bool:
    """Return whether the sender sends these parameters to one rank only, which receives them from
    no other rank."""
    assert t.ranks is not None
    others = [
        o.ranks
        for o in plan.transfers
        if o.ranks is not None
        and o.ranks != t.ranks
        and o.payload.buffer == t.payload.buffer
        and set(o.payload.buckets) & set(t.payload.buckets)
    ]
    return not any(o[0] == t.ranks[0] or o[1] == t.ranks[1] for o in others)


def _move_anchor(plan: Plan, transfers: Iterable[Transfer]) -> Iterator[Apply]:
    """Yield the applies of the plan, with rules for the anchor.

    An outer optimizer moves the averaged parameters equally on all ranks, so the anchor follows
    them. Rules that weight ranks in an average use changes against the anchor.
    """
    anchor = next((t.wire.anchor for t in transfers if t.wire is not None and t.wire.anchor), None)
    carried = {t.target for t in plan.transfers}
    for apply in plan.applies:
        origin = effects.origin_setting(apply) if anchor is not None else None
        if origin is not None and "param" in effects.writes(apply):
            yield replace(apply, args={**dict(apply.args), origin: anchor})  # type: ignore[arg-type]
            continue
        yield apply
        if anchor is not None and effects.common_buffers_of(apply):
            [moved] = effects.writes(apply) & carried
            args = {"source": moved, "target": anchor}
            yield replace(apply, rule="copy", args=args)  # type: ignore[arg-type]


def _residual_name(kind: str, link: str, plan: Plan) -> str:
    """Return the name of the buffer of encoding errors.

    Messages on two links have no order. If two links carry the same buckets, each link has its own
    buffer.
    """
    name = "residual" if kind == "param" else "residual_grad"
    carried: dict[str, set[int]] = {}
    for t in plan.transfers:
        if plan.all_buffers[t.payload.buffer].kind == kind:
            carried.setdefault(t.link, set()).update(t.payload.buckets)
    others = [carried[other] for other in carried if other != link]
    shared = any(carried[link] & other for other in others)
    return f"{name} of {link}" if shared else name


def fastest(payload: Payload, wire: Wire, profile: Profile, link: str) -> Wire:
    """Return the wire with the collective of the shortest predicted time; ties go to the first."""
    ways = [
        replace(wire, args={**dict(wire.args), "via": via})
        for via in SETTINGS[wire.name]["via"].words
    ]
    return min(ways, key=lambda w: Encoded(profile, payload, w, "all_reduce").seconds(link))


def encoded_message_s(profile: Profile, kind: Kind, wire: Wire) -> float:
    """Return the seconds of one encoded average of all buckets on the default link; 0 for a single
    rank."""
    if profile.world_size == 1:
        return 0.0
    payload = Payload(kind, range(len(profile.buckets)))
    encoded = Encoded(profile.slowest(), payload, wire, "all_reduce")
    return encoded.seconds(profile.default_link.name)


def _require_smaller(wire: Wire, transfers: Iterable[Transfer], profile: Profile) -> None:
    used = codec(wire.name, dict(wire.args))
    if not isinstance(used, PowerSGD):
        return
    sizes = [profile.payload_bytes("grad", t.payload.buckets) // t.payload.parts for t in transfers]
    most = int(max(sizes, default=0) / profile.element_bytes)
    if used.is_dense(most):
        sides = matrix_shape(most)
        raise ValueError(
            f"rank ({used.rank}) of wire 'powersgd' must be below {most / sum(sides):.4g}: the "
            f"largest message is a matrix of {sides[0]} x {sides[1]}, and factors of a higher "
            "rank are no smaller; use a smaller rank, or wire='none'"
        )


def _add_memory(
    facts: Iterable[Fact], buffers: Mapping[str, Buffer], profile: Profile
) -> Iterator[Fact]:
    """Yield the facts, with the memory of the wire's buffers added to `memory_bytes`."""
    everything = range(len(profile.buckets))
    more = sum(profile.payload_bytes(buffer.kind, everything) for buffer in buffers.values())
    for fact in facts:
        yield replace(fact, value=fact.value + more) if fact.name == "memory_bytes" else fact


def _wire_facts(wire: Wire, transfers: Iterable[Transfer], profile: Profile) -> list[Fact]:
    ways = sorted({t.wire.arg("via", t.verb) for t in transfers if t.wire is not None})
    facts = [Fact("wire", f"{wire.name} by {' and '.join(ways)}", "codec, and how codes go round")]
    sent = {t.payload.buffer for t in transfers if t.wire is None}
    plain = ["running statistics"] if any(b.buffer_bytes for b in profile.buckets) else []
    names = {"state": "optimizer state", "param": "parameters"}
    plain += [name for buffer, name in names.items() if buffer in sent]
    if plain:
        facts.append(Fact("uncompressed", plain, "what is sent as it is"))
    return facts


# ---- costs for planners of plain messages -------------------------------------------------


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


# ---- texts of codecs ----------------------------------------------------------------------


def codec_of(text: str) -> Codec | None:
    """Return the codec of a setting such as "int4" or "topk:0.01"; None for "none".

    Raises:
        ValueError: `text` names no codec, or its value is out of range.
    """
    name = str(text).partition(":")[0]
    require_choice("wire", name, (NONE, *WIRES))
    return None if name == NONE else codec(name, codec_arguments(text))


def codec_arguments(text: str) -> dict[str, Any]:
    """Return the settings of a codec from its text; raise ValueError if a value is invalid."""
    name, colon, value = text.partition(":")
    settings = WIRES[name].settings if name in WIRES else {}
    if not settings:
        if colon:
            raise ValueError(f"wire ({text!r}) must be {name!r}, which has no settings")
        return {}
    [(key, setting)] = settings.items()
    example = f"{name}:{'4' if setting.what == 'count' else '0.01'}"
    try:
        number = int(value) if setting.what == "count" else float(value)
    except ValueError:
        raise ValueError(f"wire ({text!r}) must say a {key}, as in {example!r}") from None
    low = number <= setting.least if setting.above else number < setting.least
    if low or not number <= setting.most:
        least = f"above {setting.least:g}" if setting.above else f"at least {setting.least:g}"
        most = "" if setting.most == float("inf") else f" and at most {setting.most:g}"
        raise ValueError(
            f"{key} ({value}) of wire {name!r} must be {least}{most}, as in {example!r}"
        )
    return {key: number}
