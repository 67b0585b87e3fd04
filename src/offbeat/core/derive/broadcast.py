"""Broadcast of the module's buffers from rank 0 to all ranks, before the next forward."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import BUFFERS, CHANNEL, Moment, Payload, Plan, Transfer, base_link

NEXT_FORWARD = Moment("forward", lag=1)


def broadcast_channel(link: str) -> str:
    """Return the channel of a link that carries the module's buffers. Gradients do not delay it."""
    return f"{base_link(link)}{CHANNEL}{BUFFERS}"


def with_broadcast(plan: Plan, link: str, *, before: Moment = NEXT_FORWARD) -> Plan:
    """Return the plan with one broadcast of the module's buffers in each iteration.

    torch's DDP broadcasts before each forward. Only forward writes these buffers, even if backward
    computes activations again. So the message is sent at the end of backward, and the optimizer
    step and the script's code before the next forward hide its time.
    """
    if any(t.verb == "broadcast" for t in plan.transfers):
        return plan
    message = Transfer(
        Payload(BUFFERS, range(plan.buckets)),
        after=Moment("grad"),
        before=before,
        phases=Phases(plan.phases),
        link=broadcast_channel(link),
        verb="broadcast",
    )
    return replace(plan, transfers=(*plan.transfers, message))


def without_broadcast(plan: Plan) -> Plan:
    """Return the plan without broadcasts: each rank keeps its own buffers."""
    kept = tuple(t for t in plan.transfers if t.verb != "broadcast")
    return plan if len(kept) == len(plan.transfers) else replace(plan, transfers=kept)
