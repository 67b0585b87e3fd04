"""What a worker does if the graph is partitioned."""

from __future__ import annotations

from typing import Literal

from offbeat.gossip.protocol import ids_text
from offbeat.gossip.view import State, View

OnPartition = Literal["raise", "continue"]


def remaining_part(view: View, on_partition: OnPartition) -> tuple[list[int] | None, str]:
    """Return the part with which this worker goes on, and a notice for the user or "".

    The part is None while the graph is whole. A partition raises RuntimeError, unless workers have
    left, the members of all other parts have probably failed, or `on_partition="continue"` and this
    worker is in the largest part.
    """
    parts = view.parts()
    if len(parts) == 1:
        return None, ""
    words = " and ".join(f"({ids_text(part)})" for part in parts)
    own_part = next(part for part in parts if view.me in part)
    fatal = on_partition == "raise" or own_part != parts[0]
    if fatal and not view.has_leavers() and not view.is_surviving_majority(own_part):
        raise RuntimeError(
            f"the graph of gossip falls apart: {words} do not reach each other any more "
            f"(not heard of: {ids_text(view.dead_workers()) or 'nobody'}); use a "
            "topology with more edges, or on_partition='continue' to go on with the larger part"
        )
    around = view.neighbours_of(view.me)
    is_done = all(view.state(peer) is State.LEFT for peer in around)
    lost = not is_done and view.has_lost_connection()
    notice = f"the graph of gossip is in parts: {words}; ({ids_text(own_part)}) go on"
    return own_part, notice if lost else ""
