"""Memory that training takes on one rank: the model, what its plan adds, and messages in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offbeat.core.codecs import codec, way
from offbeat.core.codecs.pieces import CUT
from offbeat.core.derive import effects
from offbeat.core.plan import BUILT_IN, Apply, Buffer, Plan, Transfer, Wire
from offbeat.core.plan.program import position
from offbeat.core.plan.types import moment_of
from offbeat.core.profile import Profile

ITEM = 4  # bytes of a number that is encoded


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one rank, without activations, which come on top.

    Attributes:
        parameters_bytes: parameters and averaged buffers of the model.
        gradients_bytes: one copy of the gradients.
        state_bytes: state of the optimizer.
        buffers_bytes: buffers that the strategy adds, and further copies of gradients.
        staged_bytes: largest total size of message copies in flight.
    """

    parameters_bytes: float
    gradients_bytes: float
    state_bytes: float
    buffers_bytes: float = 0.0
    staged_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Return the sum of all parts."""
        held = self.parameters_bytes + self.gradients_bytes + self.state_bytes
        return held + self.buffers_bytes + self.staged_bytes


def held_memory(profile: Profile, buffers: Iterable[Buffer] = (), staged_bytes: int = 0) -> Memory:
    """Return the memory of a rank that holds the whole model.

    Args:
        profile: sizes of the model.
        buffers: buffers in addition to parameters, gradients and optimizer state. A built-in buffer
            with several copies counts from its second copy on.
        staged_bytes: bytes of message copies in flight.
    """
    everything = range(len(profile.buckets))
    sizes = {kind: profile.payload_bytes(kind, everything) for kind in ("grad", "param", "state")}
    added = 0
    for buffer in buffers:
        held = buffer.name in BUILT_IN or moment_of(buffer.name) is not None
        copies = buffer.copies - held
        added += copies * sizes.get(buffer.kind, profile.broadcast_bytes)
    return Memory(
        parameters_bytes=sizes["param"],
        gradients_bytes=sizes["grad"],
        state_bytes=sizes["state"],
        buffers_bytes=added,
        staged_bytes=staged_bytes,
    )


def largest_staged_bytes(plan: Plan, profile: Profile) -> int:
    """Return the largest number of bytes in copies of messages on one rank in an iteration.

    A message that does not work in place has a copy from its release to its deadline, of the
    numbers before encoding. All copies of an iteration count as simultaneous, with those of earlier
    iterations whose deadlines it contains. Of a message between two ranks both have a copy, and no
    other rank. The largest encoded message of each link is coded at the same time.
    """
    coding, kept = Counter[str](), kept_in_storage(plan)
    for t in plan.transfers:
        if t.wire is not None:
            part = CUT if id(t) in kept else 0
            coding[t.link] = max(coding[t.link], _coding_bytes(t, t.wire, plan, profile, part))
    staged = [t for t in plan.transfers if not t.in_place and id(t) not in kept]
    first = plan.prologue + max((t.before.lag for t in staged), default=0) * plan.period
    sizes = [_bytes_of(t, plan, profile) for t in staged]
    totals = list[int]()
    for iteration in range(first, first + plan.period):
        everywhere, own = 0, Counter[int]()
        for t, size in zip(staged, sizes, strict=True):
            held = size * _count_in_flight(t, plan, iteration)
            if t.ranks is None:
                everywhere += held
            else:
                own.update(dict.fromkeys(t.ranks, held))
        totals.append(everywhere + max(own.values(), default=0))
    return max(totals, default=0) + coding.total()


def _coding_bytes(t: Transfer, wire: Wire, plan: Plan, profile: Profile, part: int) -> int:
    """Return the bytes of the codes of all ranks, and of the `part` of the numbers that is coded at
    a time."""
    settings, numbers = dict(wire.args), _bytes_of(t, plan, profile) // ITEM
    ranks = profile.world_size if way(wire.name, settings) == "gather" else 1
    coded = ranks * codec(wire.name, settings).bytes_of(numbers, ITEM)
    return ITEM * min(part, numbers) + coded


def _bytes_of(t: Transfer, plan: Plan, profile: Profile) -> int:
    """Return the bytes of a message without a codec."""
    kind = plan.all_buffers[t.payload.buffer].kind
    return profile.bytes_of(replace(t.payload, buffer=kind))


def _count_in_flight(t: Transfer, plan: Plan, iteration: int) -> int:
    """Return how many messages of a transfer an iteration holds copies of."""
    released = range(iteration - t.before.lag, iteration + 1)
    return sum(plan.phase(one) in t.phases for one in released if one >= 0)


def kept_in_storage(plan: Plan) -> frozenset[int]:
    """Return the transfers, by `id`, whose messages can be encoded from the storage and store their
    result there: no rule and no other message uses their buffers from the release until they are
    due."""
    users = Counter[tuple[str, int]]()  # transfers of a buffer of a bucket
    for t in plan.transfers:
        users.update((name, b) for name in _moved(t) for b in t.payload.buckets)
    kept = []
    for t in plan.transfers:
        if t.wire is None or not _is_encoded_by_parts(t, t.wire):
            continue
        buffer, buckets = t.payload.buffer, t.payload.buckets
        taken = {buffer, t.wire.anchor or buffer, t.wire.error or buffer}
        if any(users[name, b] > (name in _moved(t)) for name in taken for b in buckets):
            continue
        applies = [a for a in plan.applies if effects.uses_any(a, taken)]
        shared = ((a, b) for a in applies for b in {*buckets} & {*a.buckets})
        if not any(_is_between(a, t, b, plan) for a, b in shared):
            kept.append(id(t))
    return frozenset(kept)


def _moved(t: Transfer) -> set[str]:
    """Return the buffers that a message reads or writes."""
    return {t.payload.buffer, t.target}


def _is_encoded_by_parts(t: Transfer, wire: Wire) -> bool:
    """Return whether a message is one of whole buffers that the codec can encode by parts."""
    if t.verb != "all_reduce" or t.payload.buffer == "grad" or t.into is not None:
        return False
    settings = dict(wire.args)
    by_parts = way(wire.name, settings) == "gather" and codec(wire.name, settings).piecewise
    return by_parts and not t.after.lag and not t.payload.age


def _is_between(apply: Apply, t: Transfer, bucket: int, plan: Plan) -> bool:
    """Return whether a rule runs on a bucket from the release of a message until it is due. At a
    moment, messages arrive before rules run, and are released after them."""
    count, at = plan.buckets, apply.at
    if at.bucket is None and at.point in ("forward", "grad"):
        at = replace(at, bucket=bucket)
    begin, end = (
        position(t.after, count),
        position(t.before, count) + t.before.lag * 2 * (count + 1),
    )
    later = plan.period * (1 + at.lag)  # so that the rule's own iteration exists
    for phase in t.phases:
        for first in {phase, phase + later if phase >= plan.prologue else phase}:
            for k in range(t.before.lag + 1):
                own = first + k - at.lag
                when = position(at, count) + k * 2 * (count + 1)
                if own >= 0 and plan.phase(own) in apply.phases and begin < when < end:
                    return True
    return False
