"""Volleys: messages that are sent only to be measured, through the links' own threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from offbeat.core.plan import Moment, transfer
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.link import Message

Volley = Mapping[str, Sequence[Message]]


def release(cluster: Cluster, loads: Mapping[str, Tensor], count: int) -> Volley:
    """Let so many messages of each link's load go, back to back on several links at once.

    They do not count as the link's traffic. Every rank must call it, and then `land`.
    """
    messages: dict[str, list[Message]] = {}
    for name in loads:
        rule = transfer(
            "grad", range(1), after=Moment("step"), before=Moment("end"), phases=[0], link=name
        )
        messages[name] = [cluster.links[name].enqueue(rule, 0) for _ in range(count)]
    for name, mine in messages.items():
        for message in mine:
            cluster.links[name].release(message, (loads[name],))
    return messages


def land(cluster: Cluster, messages: Volley) -> None:
    """Wait until all have arrived; RuntimeError naming the link where one failed."""
    for name, mine in messages.items():
        for message in mine:
            with cluster.control.waiting("measuring links"):
                arrived = message.wait(cluster.timeout_s)
            if not arrived or message.error is not None:
                raise RuntimeError(
                    f"link {name!r} failed while it was measured: {message.error}. "
                    f"{cluster.control.report_failure()}"
                )
            cluster.links[name].bytes_sent -= message.sent_bytes
