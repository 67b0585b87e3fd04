"""Memory that training takes on one rank: the model, what its plan adds, and messages in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offbeat.core.plan import BUILT_IN, Buffer, Plan, Transfer
from offbeat.core.plan.types import moment_of
from offbeat.core.profile import Profile


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

    A message that does not work in place has a copy from its release to its deadline. All copies of
    an iteration count as simultaneous, with those of earlier iterations whose deadlines it
    contains. For a codec the copy is that of the numbers before encoding. Of a message between two
    ranks both have a copy, and no other rank.
    """
    staged = [t for t in plan.transfers if not t.in_place]
    first = plan.prologue + max((t.before.lag for t in staged), default=0) * plan.period
    kinds = {name: buffer.kind for name, buffer in plan.all_buffers.items()}
    sizes = [profile.bytes_of(replace(t.payload, buffer=kinds[t.payload.buffer])) for t in staged]
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
    return max(totals, default=0)


def _count_in_flight(t: Transfer, plan: Plan, iteration: int) -> int:
    """Return how many messages of a transfer an iteration holds copies of."""
    released = range(iteration - t.before.lag, iteration + 1)
    return sum(plan.phase(one) in t.phases for one in released if one >= 0)
