"""Plan with all updates deferred to `optimizer.step()`: the same numbers with less overlap."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.plan.types import Apply, Moment, Plan, Transfer

STEP, END = Moment("step"), Moment("end")


def defer_updates(plan: Plan) -> Plan | None:
    """Return the plan with its updates in `optimizer.step()`, so that scripts may change gradients
    before.

    Updates at the next forward move to the step, and the messages that they need are due at the
    step. Updates in backward move to the step, and the averages of updated values are released
    after them.

    Returns:
        The plan, or None if updates already are in `optimizer.step()`, or if other rules or
        votes depend on the moment of updates.
    """
    points = {a.at.point for a in plan.applies if effects.is_update(a)}
    others = [a for a in plan.applies if not effects.is_update(a)]
    if plan.votes or plan.source is not None or _has_further_buffers(plan):
        return None
    if (
        points in ({"grad"}, {"grad", "step"})
        and all(map(_is_state_only, others))
        and not _averages_gradients(plan)
    ):
        move = _move_after_update
    elif points == {"forward"} and not others and plan.period == 1 and not plan.prologue:
        move = _move_before_update
    else:
        return None
    halves = any(t.verb == "all_gather" for t in plan.transfers)
    at = END if halves else STEP  # an all_gather needs the result of its reduce_scatter
    applies = tuple(replace(a, at=at) if effects.is_update(a) else a for a in plan.applies)
    return replace(plan, transfers=tuple(map(move, plan.transfers)), applies=applies)


def early_remedy(plan: Plan) -> str | None:
    """Return the advice for scripts that need updates in `step()`, if the plan applies gradients at
    other moments; otherwise None."""
    points = {apply.at.point for apply in plan.applies if effects.is_update(apply)}
    if plan.source is not None:
        return (
            "let the strategy clip each stage (clip=...), or use one that steps at once, such as "
            "WFBP()"
        )
    if "grad" in points:
        return "use scope='model'" if plan.votes else "use average='before_update'"
    if "forward" in points:
        return "use a strategy that steps at once, such as WFBP(), or update='at_step'"
    return None


def _is_state_only(apply: Apply) -> bool:
    """Return whether the apply changes nothing but the optimizer's state."""
    return effects.writes_only(apply, ("state",)) and not effects.reads(apply)


def _has_further_buffers(plan: Plan) -> bool:
    """Return whether the plan has buffers other than those of codecs."""
    wires = [t.wire for t in plan.transfers if t.wire is not None]
    own = {name for wire in wires for name in (wire.error, wire.anchor)}
    return any(buffer.name not in own for buffer in plan.buffers)


def _averages_gradients(plan: Plan) -> bool:
    return any(t.payload.buffer == "grad" for t in plan.transfers)


def _move_after_update(t: Transfer) -> Transfer:
    """Return the transfer of parameters, released when all parameters are updated."""
    return replace(t, after=STEP, before=END)


def _move_before_update(t: Transfer) -> Transfer:
    """Return the transfer due at the step; an all_gather or a broadcast due at its end."""
    return replace(t, before=END if t.verb in ("broadcast", "all_gather") else STEP)
