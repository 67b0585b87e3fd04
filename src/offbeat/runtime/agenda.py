"""Agendas: one phase of a plan as tables of what each moment releases and waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.plan import Moment, Plan, Transfer

Indices = list[int]


@dataclass(slots=True)
class Agenda:
    """A phase's transfers in issue order and, by their index, the moments that concern them.

    `at_*` release, `due_*` wait: `due_next_forward[b]` forward(b) of the iteration after,
    `due_step[lag]` the step so many iterations later.
    """

    transfers: tuple[Transfer, ...]
    at_grad: list[Indices]
    at_updated: list[Indices]
    due_next_forward: list[Indices]
    at_forward: Indices = field(default_factory=list)
    at_step: Indices = field(default_factory=list)
    due_step: dict[int, Indices] = field(default_factory=dict)
    due_end: Indices = field(default_factory=list)


def agenda(plan: Plan, phase: int) -> Agenda:
    """Tables of one phase; ValueError for a moment that the runtime does not act on."""
    transfers = tuple(t for t in plan.transfers if phase in t.phases)
    a, b, c = ([[] for _ in range(plan.buckets)] for _ in range(3))
    tables = Agenda(transfers, a, b, c)
    for i, t in enumerate(transfers):
        _releasing(tables, t.after, plan).append(i)
        _awaiting(tables, t.before, plan).append(i)
    return tables


def _releasing(tables: Agenda, after: Moment, plan: Plan) -> Indices:
    last = plan.buckets - 1 if after.bucket is None else after.bucket
    if after == Moment("step"):
        return tables.at_step
    if after.point == "grad" and after.lag == 0:
        return tables.at_grad[last]
    if (
        after.point == "updated"
        and after.lag == 0
        and plan.updates != "on_arrival"
        and not plan.closes
    ):
        return tables.at_updated[last]
    if after.point == "forward" and after.lag == 0 and last == plan.buckets - 1:
        return tables.at_forward
    raise ValueError(
        f"release {after} must be grad, updated, step or the model's forward, of its own "
        "iteration: later ones would make a rank's updates wait for the other ranks' forwards"
    )


def _awaiting(tables: Agenda, before: Moment, plan: Plan) -> Indices:
    if before.point == "step":
        return tables.due_step.setdefault(before.lag, [])
    if before == Moment("end"):
        return tables.due_end
    if before.point == "forward" and before.lag == 1 and plan.updates == "on_arrival":
        last = plan.buckets - 1 if before.bucket is None else before.bucket
        return tables.due_next_forward[last]
    raise ValueError(
        f"deadline {before} must be a step, the iteration's end, or with updates on arrival a "
        "forward of the next iteration"
    )
