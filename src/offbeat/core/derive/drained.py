"""Plan that averages and applies the gradients which a plan has accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offbeat.core.derive import effects
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.phases import Phases
from offbeat.core.plan.types import Apply, Moment, Payload, Plan, Transfer, groups_of

GRAD, STEP = Moment("grad"), Moment("step")
ONCE = Phases([0])


def drained_plan(plan: Plan, planned: int, links: tuple[str, ...] = ()) -> Plan | None:
    """Return a plan of one iteration without compute, after which no gradients are accumulated.

    It sends what the plan would send in later iterations, exactly instead of encoded.

    Args:
        plan: plan with accumulation windows.
        planned: number of the next iteration in the plan.
        links: links of the job, if the plan has none that spans all ranks.

    Returns:
        The plan, or None if no gradients are accumulated.
    """
    windows = Windows(plan)
    if not windows.late:
        return None
    closed, opened = windows.window(planned, age=1), windows.window(planned)
    transfers: list[Transfer] = []
    ages: list[int] = []
    if closed:
        ages.append(1)
        transfers += _remaining_transfers(plan, windows, planned, closed)
    if opened.start < planned:
        ages.append(0)
        everything = Payload("grad", range(plan.buckets))
        link = next(name for name in (*plan.links, *links) if not groups_of(name, plan.groups))
        transfers.append(Transfer(everything, GRAD, STEP, ONCE, link))
    update = next((apply for apply in plan.applies if effects.is_update(apply)), None)
    applies = [] if update is None else [_apply_copy(update, plan.buckets, age) for age in ages]
    if not ages:
        return None
    return replace(
        plan,
        transfers=tuple(transfers),
        applies=tuple(applies),
        votes=(),
        period=1,
        prologue=0,
        bound_s=None,
        facts=(),
    )


def _remaining_transfers(
    plan: Plan, windows: Windows, planned: int, window: range
) -> Iterator[Transfer]:
    """Yield the transfers of a closed window that the plan schedules in later iterations."""
    while True:
        for t in plan.transfers:
            if t.payload.age and plan.phase(planned) in t.phases:
                yield Transfer(t.payload, GRAD, STEP, ONCE, t.link)
        if windows.applied_window(planned) == window:
            return
        planned += 1


def _apply_copy(update: Apply, buckets: int, age: int) -> Apply:
    """Return the update of the whole model with one copy of the gradients."""
    args = tuple((dict(update.args) | {"age": age}).items())
    return Apply(update.rule, range(buckets), STEP, ONCE, args=args)
