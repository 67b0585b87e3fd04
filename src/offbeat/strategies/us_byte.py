"""US-Byte: messages of different numbers of unit blocks, sized so that none delays a more urgent
gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from offbeat.core.plan import Fact, Payload, Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.strategies.slices import (
    Order,
    Prioritized,
    Update,
    compute_of,
    fastest,
    forward_plan,
    parts_of,
    sizes_to_try,
    slice_of,
)
from offbeat.strategies.solvers import improved, iteration_s, unit_runs

MOST_EVALUATIONS = 5000  # largest number of evaluated orders of all messages


@dataclass(frozen=True)
class USByte(Prioritized):
    """Send messages of different sizes; each ends about when the next gradient is ready.

    Buckets are divided into unit blocks. During backward, the bucket nearest the input side sends
    in one message as many of its blocks as end near the next gradient. During forward it sends all
    remaining blocks.

    A local search then swaps messages, or joins neighbouring ones (blocks of one bucket, or whole
    buckets), while the predicted iteration becomes shorter.
    """

    unit_elements: int | None = None
    """Largest number of 4-byte elements in a unit block; None: tuned by simulation."""
    update: Update = "on_arrival"
    """Time of the updates: before the next forward of each bucket (`on_arrival`), or in
    `optimizer.step()` (`at_step`), for scripts that clip or read gradients before the step."""

    name: ClassVar[str] = "us-byte"
    citation: ClassVar[str] = (
        "Gao et al., US-Byte: An Efficient Communication Framework for Scheduling Unequal-Sized "
        "Tensor Blocks in Distributed Deep Learning, IEEE TPDS 2023"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_elements is not None:
            require_count("unit_elements", self.unit_elements, remedy="use None to have it tuned")

    def schedule(self, profile: Profile) -> Plan:
        slowest = profile.slowest()
        one = self.unit_elements
        sizes = sizes_to_try(slowest) if one is None else [one]
        orders = [_messages(slowest, size) for size in sizes]
        best = fastest(orders, slowest)
        order = _improve_order(orders[best], slowest)
        facts = [Fact("unit_elements", sizes[best], "most elements of a unit block")]
        return forward_plan(self.name, profile, order, facts, self.update)


def _messages(profile: Profile, unit_elements: int) -> Order:
    """Return the messages of each bucket's unit blocks, fused to unequal sizes."""
    link, parts = profile.default_link.name, parts_of(profile, unit_elements)

    @cache
    def blocks_s(b: int, width: int) -> float:
        return profile.message_s(_payload(range(b, b + 1), range(width), parts[b]), link)

    return tuple(
        _payload(range(b, b + 1), run, parts[b])
        for b, run in unit_runs(profile.ready_s, parts, blocks_s)
    )


def _improve_order(order: Order, profile: Profile) -> Order:
    """Return the order after a local search for a shorter predicted iteration."""
    compute = compute_of(profile)
    slice_ = cache(lambda payload: slice_of(payload, profile))
    return tuple(
        improved(
            order,
            lambda payloads: iteration_s([slice_(p) for p in payloads], compute),
            _join_messages,
            MOST_EVALUATIONS,
        )
    )


def _join_messages(first: Payload, second: Payload) -> Payload | None:
    """Return one message for two neighbours (blocks of one bucket, or whole buckets), or None."""
    if first.buckets == second.buckets and first.part + first.width == second.part:
        blocks = range(first.part, second.part + second.width)
        return _payload(first.buckets, blocks, first.parts)
    if first.buckets.stop == second.buckets.start and first.parts == second.parts == 1:
        return Payload("grad", range(first.buckets.start, second.buckets.stop))
    return None


def _payload(buckets: range, blocks: range, parts: int) -> Payload:
    if len(blocks) == parts:
        return Payload("grad", buckets)
    return Payload("grad", buckets, blocks.start, parts, len(blocks))
