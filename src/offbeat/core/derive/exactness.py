"""Plans whose results have the same bits: equal sums in another order of messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.plan.types import BUFFERS, Moment, Plan, Transfer, base_link

_MOMENT = Moment("step")


def is_reorderable(plan: Plan) -> bool:
    """Return whether another order of the plan's messages gives the same bits.

    Such a plan repeats every iteration and averages whole gradients of the iteration, in place and
    without a codec, a vote or a buffer of its own. It then has no state between iterations that a
    restart would change.
    """
    messages_alike = all(
        t.payload.buffer in ("grad", BUFFERS)
        and not t.payload.age
        and t.in_place
        and t.ranks is None
        and t.when is None
        for t in plan.transfers
    )
    return (
        messages_alike
        and (plan.period, plan.prologue) == (1, 0)
        and not plan.votes
        and not plan.buffers
        and plan.source is None
        and all(a.when is None and not effects.is_window_end(a) for a in plan.applies)
    )


def have_same_bits(first: Plan, second: Plan) -> bool:
    """Return whether a job that changes from one plan to the other computes the same bits.

    Both plans send the same messages, in any order and at any moment, and apply the same rules. So
    each sum has the same terms in the same order.
    """
    if first.digest == second.digest:
        return True
    return (
        is_reorderable(first)
        and is_reorderable(second)
        and first.groups == second.groups
        and Counter(first.applies) == Counter(second.applies)
        and _messages(first) == _messages(second)
    )


def _messages(plan: Plan) -> Counter[Transfer]:
    """Return the messages without the moments at which they are sent."""
    return Counter(
        replace(t, after=_MOMENT, before=_MOMENT, link=base_link(t.link)) for t in plan.transfers
    )
