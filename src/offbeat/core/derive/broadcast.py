"""The broadcast of the module's buffers: rank 0's for all ranks, before the next forward."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import BUFFERS, CHANNEL, Moment, Payload, Plan, Transfer, base_link

NEXT_FORWARD = Moment("forward", lag=1)


def broadcast_channel(link: str) -> str:
    """Return the channel of a link that carries buffers, so that no gradient delays them."""
    return f"{base_link(link)}{CHANNEL}{BUFFERS}"


def with_broadcast(plan: Plan, link: str, *, before: Moment = NEXT_FORWARD) -> Plan:
    """Return the plan with one broadcast of the module's buffers in every iteration.

    torch's DDP broadcasts before each forward. Only forward writes buffers, also where backward
    computes activations again. So the message leaves when backward is over, and the step and
    whatever the script does before the next forward hide it.
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
    """Return the plan in which every rank keeps its own buffers."""
    kept = tuple(t for t in plan.transfers if t.verb != "broadcast")
    return plan if len(kept) == len(plan.transfers) else replace(plan, transfers=kept)
