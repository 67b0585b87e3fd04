"""Lean plans: fewer optimizer calls in plans whose gradients only the user's optimizer uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from offbeat.core.derive import effects
from offbeat.core.plan.phases import Phases
from offbeat.core.plan.program import Program
from offbeat.core.plan.types import Apply, Moment, Plan


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


def lean(plan: Plan) -> Plan:
    """Return a plan with as few updates in backward as possible; `plan` itself if gradients have
    other uses.

    A bucket that is sent in backward is updated right before its release. All other buckets are
    updated in `optimizer.step()`, before any other rule of the step. The numbers are the same,
    because no code reads the parameters in between. In phases whose backward has other actions,
    and after other rules of the step, updates stay where they are.
    """
    if not keeps_gradients(plan):
        return plan
    moved = [*_movable_updates(plan)]
    rule = next((apply.rule for apply in moved), "local")  # a strategy may give it another name
    runs: dict[tuple[Moment, range], list[tuple[int, int]]] = defaultdict(list)
    edges = Program(plan).edges
    for phases in pairwise((*edges, plan.prologue + plan.period)):
        mine = [apply for apply in moved if phases[0] in apply.phases]
        for at, run in _places(plan, phases[0], mine, moved):
            runs[at, run].append(phases)
    made = [Apply(rule, run, at, Phases.of_runs(own)) for (at, run), own in runs.items()]
    return replace(plan, applies=(*made, *(a for a in plan.applies if a not in moved)))


def _movable_updates(plan: Plan) -> Iterator[Apply]:
    """Yield the plain updates, but those that follow another rule of the step."""
    follows = False
    for apply in plan.applies:
        plain = effects.is_update(apply) and (apply.when, apply.ranks) == (None, None)
        if plain and (apply.at.point == "grad" or (apply.at.point == "step" and not follows)):
            yield apply
        elif apply.at.point == "step":
            follows = True


def _places(
    plan: Plan, phase: int, mine: Sequence[Apply], moved: Collection[Apply]
) -> Iterator[tuple[Moment, range]]:
    """Yield moment and buckets of each update in a phase."""
    if not _only_updates(plan, phase, moved):
        yield from ((apply.at, apply.buckets) for apply in mine)
        return
    left = {b for apply in mine for b in apply.buckets}
    early = {b for apply in mine if apply.at.point == "grad" for b in apply.buckets}
    sent = [t for t in plan.transfers if phase in t.phases and t.after.point == "grad"]
    last = plan.buckets - 1
    for t in sorted(sent, key=lambda t: last if t.after.bucket is None else t.after.bucket):
        at = last if t.after.bucket is None else t.after.bucket
        due = {b for b in early.intersection(t.payload.buckets) if b <= at}
        yield from ((Moment("grad", at), run) for run in _runs(due))
        early.difference_update(due)
        left.difference_update(due)
    yield from ((Moment("step"), run) for run in _runs(left))


def _only_updates(plan: Plan, phase: int, moved: Collection[Apply]) -> bool:
    """Return whether backward only updates and releases; lags count in all phases."""
    others = [a.at for a in plan.applies if a not in moved and (a.at.lag or phase in a.phases)]
    waits = [t.before for t in plan.transfers if t.before.lag or phase in t.phases]
    return all(moment.point != "grad" for moment in (*others, *waits))


def _runs(buckets: Iterable[int]) -> list[range]:
    """Return the runs of consecutive buckets."""
    return [range(*run) for run in Phases(buckets).runs]
