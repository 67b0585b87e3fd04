"""Planning and plan of strategies that send slices of gradients by priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.plan import Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned
from offbeat.strategies.compressible import Synchronous
from offbeat.strategies.solvers import Compute, Slice, iteration_s, priority_order

MOST_MESSAGES = 1024  # largest number of messages in tuning; more are slow to plan and to send
TIE = 1e-3  # relative precision of predictions: within it the order with fewer messages wins

Order = tuple[Payload, ...]
Update = Literal["on_arrival", "at_step"]
"""Time of a bucket's update: before its next forward, or with all other buckets in
`optimizer.step()`."""


class Prioritized(Synchronous):
    """Base class of strategies that send slices of gradients by priority and have a setting
    `update`."""

    update: Update

    def at_step(self) -> Planned | None:
        return replace(self, update="at_step") if self.update == "on_arrival" else None


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
