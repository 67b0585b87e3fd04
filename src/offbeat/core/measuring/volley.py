"""Volleys: messages that are sent for measurements only, through the threads of the links."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from offbeat.core.plan import Moment, transfer
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.link import Message


def send_volley(
    cluster: Cluster, loads: Mapping[str, Tensor], count: int
) -> dict[str, list[Message]]:
    """Send `count` messages of each link's load, back to back on several links at once.

    Return the messages after all have arrived. They do not count in `Link.bytes_sent`. Every rank
    must call it.

    Raises:
        RuntimeError: a message has failed or has timed out; names its link.
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
    return messages
