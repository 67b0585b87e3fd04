"""A plan with everything put off to the step: the same numbers, at the price of its overlap."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.plan.types import Apply, Moment, Plan, Transfer

STEP, END = Moment("step"), Moment("end")


def defer_updates(plan: Plan) -> Plan | None:
    """The plan with its updates in `optimizer.step()`, so that scripts may change gradients before
    it. None where updates happen there anyway, and where other rules or votes depend on them.

    Updates at the next forward come at the step, and what they wait for is due there. Updates in
    backward come at the step, and what is averaged after them leaves then.
    """
    updates = {a.at.point for a in plan.applies if effects.is_update(a)}
    others = [a for a in plan.applies if not effects.is_update(a)]
    if plan.votes or plan.source is not None or _further(plan) or len(updates) != 1:
        return None
    [point] = updates
    if point == "grad" and all(_of_state(a) for a in others) and not _averages_gradients(plan):
        move = _behind_update
    elif point == "forward" and not others and plan.period == 1 and not plan.prologue:
        move = _before_update
    else:
        return None
    halves = any(t.verb == "all_gather" for t in plan.transfers)
    at = END if halves else STEP  # a second half can only leave when the first is there
    applies = tuple(replace(a, at=at) if effects.is_update(a) else a for a in plan.applies)
    return replace(plan, transfers=tuple(map(move, plan.transfers)), applies=applies)


def _of_state(apply: Apply) -> bool:
    """Whether the optimizer's state is all that it changes."""
    return effects.writes_only(apply, ("state",)) and not effects.reads(apply)


def _further(plan: Plan) -> bool:
    """Whether it has buffers beside those of its wires."""
    wires = [t.wire for t in plan.transfers if t.wire is not None]
    own = {name for wire in wires for name in (wire.error, wire.anchor)}
    return any(buffer.name not in own for buffer in plan.buffers)


def _averages_gradients(plan: Plan) -> bool:
    return any(t.payload.buffer == "grad" for t in plan.transfers)


def _behind_update(t: Transfer) -> Transfer:
    """Parameters leave when all are updated."""
    return replace(t, after=STEP, before=END)


def _before_update(t: Transfer) -> Transfer:
    """Gradients are there when backward is over."""
    if t.verb == "broadcast":
        return replace(t, before=END)
    if t.verb == "all_gather":
        return replace(t, before=END)
    return replace(t, before=STEP)
