"""Strategies that send slices of gradients by priority: P3, ByteScheduler and US-Byte.

Input-side gradients are needed first, by the next forward. Each strategy makes an order of messages
for one link (`solvers/ordering.py`, `solvers/usbyte.py`), and `forward_plan` makes the plan of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar, Literal

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.plan import Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.compressible import Synchronous
from offbeat.strategies.solvers import (
    Compute,
    Slice,
    improved,
    iteration_s,
    priority_order,
    unit_runs,
)

MOST_MESSAGES = 1024  # largest number of messages in tuning; more are slow to plan and to send
MOST_SUGGESTED_SLICES = 2000  # of the whole model; more slices cost latency and planning time
MOST_EVALUATIONS = 5000  # largest number of evaluated orders of all messages
TIE = 1e-3  # relative precision of predictions: within it the order with fewer messages wins
TUNED = "use None to have it tuned"

Order = tuple[Payload, ...]
Update = Literal["on_arrival", "at_step"]


@dataclass(frozen=True)
class Prioritized(Synchronous):
    """Base class of strategies whose updates can wait for the next forward of each bucket."""

    update: Update = field(default="on_arrival", kw_only=True)
    """Time of the updates: when the messages of a bucket have arrived, before its next forward
    (`on_arrival`), or in `optimizer.step()` (`at_step`), for scripts that clip or read gradients
    before the step."""

    def at_step(self) -> Planned | None:
        return replace(self, update="at_step") if self.update == "on_arrival" else None


@dataclass(frozen=True)
class P3(Prioritized):
    """Send small slices of gradients, one at a time, in the order of the next forward.

    The next forward of a bucket waits only for the slices of this bucket. The optimizer updates the
    bucket immediately before that forward.
    """

    slice_elements: int = 40_000
    """Largest number of 4-byte elements in a slice."""

    name: ClassVar[str] = "p3"
    citation: ClassVar[str] = (
        "Jayarajan et al., Priority-based Parameter Propagation for Distributed DNN Training, "
        "MLSys 2019"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("slice_elements", self.slice_elements)

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        elements = sum(bucket.size_bytes for bucket in profile.buckets) // ELEMENT_BYTES
        return (cls(slice_elements=max(cls.slice_elements, elements // MOST_SUGGESTED_SLICES)),)

    def schedule(self, profile: Profile) -> Plan:
        order = priority_slices(profile.slowest(), self.slice_elements, credit_bytes=1)
        return forward_plan(self.name, profile, order, update=self.update)


@dataclass(frozen=True)
class ByteScheduler(Prioritized):
    """Send slices of gradients in the order of the next forward, in flight up to a credit.

    While the elements in flight are below the credit, the ready slice nearest the input side is
    sent. The next forward of a bucket waits only for the slices of this bucket, and the optimizer
    updates the bucket immediately before that forward. Small buckets are not fused.
    """

    partition_elements: int | None = None
    """Largest number of 4-byte elements in a slice; None: tuned by simulation. The paper uses
    4,000,000."""
    credit_elements: int | None = None
    """Largest number of elements in flight; 1: one slice at a time; None: tuned by simulation. The
    paper uses 16,000,000."""

    name: ClassVar[str] = "bytescheduler"
    citation: ClassVar[str] = (
        "Peng et al., A Generic Communication Scheduler for Distributed DNN Training "
        "Acceleration, SOSP 2019"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("partition_elements", "credit_elements"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), remedy=TUNED)

    def schedule(self, profile: Profile) -> Plan:
        slowest = profile.slowest()
        tried = self._settings_to_try(slowest)
        orders = [priority_slices(slowest, size, ELEMENT_BYTES * credit) for size, credit in tried]
        best = fastest(orders, slowest)
        size, credit = tried[best]
        facts = (
            Fact("partition_elements", size, "most elements of a slice"),
            Fact("credit_elements", credit, "elements in flight at once"),
        )
        return forward_plan(self.name, profile, orders[best], facts, self.update)

    def _settings_to_try(self, profile: Profile) -> list[tuple[int, int]]:
        """Return pairs of slice size and credit, in elements, that tuning compares."""
        partition, credit = self.partition_elements, self.credit_elements
        return [
            (size, in_flight)
            for size in (sizes_to_try(profile) if partition is None else [partition])
            for in_flight in ((1, size, 4 * size) if credit is None else [credit])
        ]


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

    name: ClassVar[str] = "us-byte"
    citation: ClassVar[str] = (
        "Gao et al., US-Byte: An Efficient Communication Framework for Scheduling Unequal-Sized "
        "Tensor Blocks in Distributed Deep Learning, IEEE TPDS 2023"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_elements is not None:
            require_count("unit_elements", self.unit_elements, remedy=TUNED)

    def schedule(self, profile: Profile) -> Plan:
        slowest = profile.slowest()
        one = self.unit_elements
        sizes = sizes_to_try(slowest) if one is None else [one]
        orders = [_unit_messages(slowest, size) for size in sizes]
        best = fastest(orders, slowest)
        order = _improve_order(orders[best], slowest)
        facts = [Fact("unit_elements", sizes[best], "most elements of a unit block")]
        return forward_plan(self.name, profile, order, facts, self.update)


def _unit_messages(profile: Profile, unit_elements: int) -> Order:
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


# ---- orders and their plan --------------------------------------------------------------


def compute_of(profile: Profile) -> Compute:
    """Return the compute that overlaps with messages. A bucket's forward includes its update."""
    forward_s = [
        bucket.forward_s + step_s
        for bucket, step_s in zip(profile.buckets, profile.bucket_step_s, strict=True)
    ]
    return Compute(profile.ready_s, forward_s, profile.other_s)


def slice_of(payload: Payload, profile: Profile) -> Slice:
    """Return the message as a slice for the solvers, with its seconds on the default link and its
    bytes.

    An empty message counts as one byte.
    """
    seconds = profile.message_s(payload, profile.default_link.name)
    return Slice(payload.buckets[-1], seconds, max(profile.bytes_of(payload), 1))


def parts_of(profile: Profile, elements: int) -> list[int]:
    """Return, for each bucket, the number of equal slices of at most `elements` elements."""
    most_bytes = elements * ELEMENT_BYTES
    return [max(-(-bucket.size_bytes // most_bytes), 1) for bucket in profile.buckets]


def sizes_to_try(profile: Profile) -> list[int]:
    """Return slice sizes in elements: the largest bucket, halved repeatedly up to `MOST_MESSAGES`
    slices."""
    largest_bytes = max(bucket.size_bytes for bucket in profile.buckets)
    sizes = [max(-(-largest_bytes // ELEMENT_BYTES), 1)]
    while sizes[-1] > 1 and sum(parts_of(profile, -(-sizes[-1] // 2))) <= MOST_MESSAGES:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def priority_slices(profile: Profile, elements: int, credit_bytes: int) -> Order:
    """Return slices of at most `elements` elements in the order of a priority queue with a credit.

    A credit of 1 byte keeps one slice in flight at a time.
    """
    payloads = [
        Payload("grad", range(bucket, bucket + 1), part, parts)
        for bucket, parts in enumerate(parts_of(profile, elements))
        for part in range(parts)
    ]
    # All slices of a bucket take the same time: they differ by at most one element.
    one = [slice_of(payload, profile) for payload in payloads if payload.part == 0]
    slices = [one[payload.buckets.start] for payload in payloads]
    return tuple(payloads[i] for i in priority_order(slices, profile.ready_s, credit_bytes))


def order_s(order: Sequence[Payload], profile: Profile) -> float:
    """Return the predicted seconds of an iteration that sends the messages in this order."""
    return iteration_s([slice_of(payload, profile) for payload in order], compute_of(profile))


def fastest(orders: Sequence[Order], profile: Profile) -> int:
    """Return the index of the order with the shortest iteration; ties within `TIE` go to the fewest
    messages."""
    seconds = [order_s(order, profile) for order in orders]
    limit_s = min(seconds) * (1 + TIE)
    good = [i for i, order_seconds in enumerate(seconds) if order_seconds <= limit_s]
    return min(good, key=lambda i: (len(orders[i]), seconds[i]))


def forward_plan(
    name: str,
    profile: Profile,
    order: Sequence[Payload],
    facts: Sequence[Fact] = (),
    update: Update = "on_arrival",
) -> Plan:
    """Return the plan that sends gradients in this order.

    With `update="on_arrival"` the next forward of a bucket waits for the bucket's messages.
    Otherwise the step waits for all messages.
    """
    arriving = update == "on_arrival"
    transfers = tuple(
        Transfer(
            payload,
            after=Moment("grad", payload.buckets[-1]),
            before=Moment("forward", payload.buckets[-1], lag=1) if arriving else Moment("step"),
            phases=Phases([0]),
            link=profile.default_link.name,
        )
        for payload in order
    )
    size = len(profile.buckets)
    updates = (local(size, Moment("forward", lag=1) if arriving else Moment("step"), [0]),)
    return Plan(name, size, transfers, updates, facts=tuple(facts))
