"""Memory that training takes on one rank: the model, what its plan adds, and messages in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offbeat.core.codecs import codec, way
from offbeat.core.codecs.pieces import CUT
from offbeat.core.derive import effects
from offbeat.core.plan import BUILT_IN, Apply, Buffer, Plan, Transfer
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
    coding = Counter[str]()
    for t in plan.transfers:
        coding[t.link] = max(coding[t.link], _coding_bytes(t, plan, profile))
    staged = [t for t in plan.transfers if not t.in_place and not stays_in_storage(t, plan)]
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


def _coding_bytes(t: Transfer, plan: Plan, profile: Profile) -> int:
    """Return the bytes of the codes of all ranks, and of the numbers that are coded at a time."""
    if t.wire is None:
        return 0
    settings, numbers = dict(t.wire.args), _bytes_of(t, plan, profile) // ITEM
    part = ITEM * min(CUT, numbers) if stays_in_storage(t, plan) else 0
    ranks = profile.world_size if way(t.wire.name, settings) == "gather" else 1
    return part + ranks * codec(t.wire.name, settings).bytes_of(numbers, ITEM)


def _bytes_of(t: Transfer, plan: Plan, profile: Profile) -> int:
    """Return the bytes of a message without a codec."""
    kind = plan.all_buffers[t.payload.buffer].kind
    return profile.bytes_of(replace(t.payload, buffer=kind))


def _count_in_flight(t: Transfer, plan: Plan, iteration: int) -> int:
    """Return how many messages of a transfer an iteration holds copies of."""
    released = range(iteration - t.before.lag, iteration + 1)
    return sum(plan.phase(one) in t.phases for one in released if one >= 0)


def stays_in_storage(t: Transfer, plan: Plan) -> bool:
    """Return whether a message can be encoded from the storage and store its result there: no rule
    and no other message uses its buffers from its release until it is due."""
    wire, buffer = t.wire, t.payload.buffer
    if wire is None or t.verb != "all_reduce" or buffer == "grad" or t.into is not None:
        return False
    settings = dict(wire.args)
    if way(wire.name, settings) != "gather" or not codec(wire.name, settings).piecewise:
        return False
    if t.after.lag or t.payload.age:
        return False
    taken = {buffer, wire.anchor or buffer, wire.error or buffer}
    carried = {*t.payload.buckets}
    others = [o for o in plan.transfers if o is not t and carried & {*o.payload.buckets}]
    if any(taken & {o.payload.buffer, o.target} for o in others):
        return False
    applies = [a for a in plan.applies if effects.uses_any(a, taken)]
    return not any(_is_between(a, t, b, plan) for a in applies for b in carried & {*a.buckets})


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
