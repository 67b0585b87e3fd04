"""Grouped updates: fewer optimizer calls in plans whose gradients only the user's optimizer
uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from offbeat.core.derive import effects
from offbeat.core.plan.program import Step
from offbeat.core.plan.types import Apply, Moment, Plan, Transfer


def keeps_gradients(plan: Plan) -> bool:
    """Return whether the gradients of an iteration are used only by the optimizer of that
    iteration.

    They are neither sent, changed or measured, nor added up over iterations.
    """
    return not plan.votes and leaves_gradients(plan)


def leaves_gradients(plan: Plan) -> bool:
    """Return whether only the optimizer changes the gradients of an iteration, in that iteration.

    Votes may read them.
    """
    buffers = plan.all_buffers
    gradients = {name for name, buffer in buffers.items() if buffer.kind == "grad"}
    if plan.source is not None or buffers["grad"].copies > 1:
        return False
    sent = {name for t in plan.transfers for name in (t.payload.buffer, t.target)}
    return not gradients & sent and all(_is_plain(apply, gradients) for apply in plan.applies)


def _is_plain(apply: Apply, gradients: Collection[str]) -> bool:
    """Return whether the apply is a plain update, or does not use gradients."""
    if effects.is_update(apply):
        return not apply.args and not apply.at.lag
    return not effects.uses_any(apply, gradients)


class GroupedUpdates(NamedTuple):
    """Steps of an iteration with grouped updates.

    Attributes:
        steps: steps of the iteration.
        rest: buckets that are updated in `optimizer.step()`, in one call.
    """

    steps: tuple[Step, ...]
    rest: tuple[int, ...] = ()


def group_updates(
    steps: Sequence[Step], transfers: Sequence[Transfer], buckets: int
) -> GroupedUpdates:
    """Return an iteration with as few updates in backward as possible.

    A bucket that is sent in backward is updated right before its release. All other buckets are
    updated in `optimizer.step()`, before any other rule of the step. The numbers are the same,
    because no code reads the parameters in between. If backward has other actions, the steps
    remain unchanged.
    """
    backward = [s for s in steps if buckets <= s.position < 2 * buckets]
    if not all(map(_only_updates, backward)):
        return GroupedUpdates(tuple(steps))
    kept, pending = {s.position: s for s in steps}, dict[int, Apply]()
    for step in backward:
        pending |= {b: apply for _, apply in step.apply for b in apply.buckets}
        leaving = sorted({b for i in step.release for b in transfers[i].payload.buckets})
        due = {b: pending.pop(b) for b in leaving if b in pending}
        if step.release:
            at = Moment("grad", step.position - buckets)
            applies = [replace(due[run[0]], buckets=run, at=at) for run in _runs(list(due))]
            kept[step.position] = step._replace(apply=tuple((0, a) for a in applies))
        else:
            del kept[step.position]
    if (last := kept.get(2 * buckets)) is not None:
        updates = [*takewhile(_is_own_update, last.apply)]
        pending |= {b: apply for _, apply in updates for b in apply.buckets}
        kept[last.position] = last = last._replace(apply=last.apply[len(updates) :])
        if last == Step(last.position):
            del kept[last.position]
    return GroupedUpdates(tuple(kept[place] for place in sorted(kept)), tuple(sorted(pending)))


def _only_updates(step: Step) -> bool:
    """Return whether a step in backward only applies its own gradients and releases messages."""
    own = all(map(_is_own_update, step.apply))
    return own and not (step.wait or step.decide or step.ask)


def _is_own_update(active: tuple[int, Apply]) -> bool:
    lag, apply = active
    return lag == 0 and effects.is_update(apply)


def _runs(buckets: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive buckets."""
    start = 0
    for i in range(1, len(buckets) + 1):
        if i == len(buckets) or buckets[i] != buckets[i - 1] + 1:
            yield range(buckets[start], buckets[i - 1] + 1)
            start = i
