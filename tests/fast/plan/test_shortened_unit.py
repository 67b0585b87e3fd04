"""The check of a plan with many equal phases is that of a shorter plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fast.plan.test_random_plans import plans

from offbeat.core.verify.check import shorten_phases
from offbeat.plan import Phases, Plan, check


def stretched(plan: Plan, by: int) -> Plan:
    """The plan with `by` further phases after each one, equal to it but for transfers and all
    that they bring: these keep to the first of them."""

    def first(phases: Phases) -> Phases:
        return Phases(p * (by + 1) for p in phases)

    def every(phases: Phases) -> Phases:
        return Phases.of_runs((a * (by + 1), z * (by + 1)) for a, z in phases.runs)

    def apply(a):
        return replace(a, phases=(every if a.rule == "local" else first)(a.phases))

    return replace(
        plan,
        transfers=tuple(replace(t, phases=first(t.phases)) for t in plan.transfers),
        applies=tuple(map(apply, plan.applies)),
        prologue=plan.prologue * (by + 1),
        period=plan.period * (by + 1),
    )


def messages(plan: Plan) -> list[str]:
    """What is wrong, without the numbers of iterations and phases."""
    return [re.sub(r"iteration \d+", "iteration", problem.message) for problem in check(plan)]


@pytest.mark.long
def test_a_shortened_plan_means_the_same(monkeypatch):
    """What is found in it is found in the whole as well, and nothing else."""
    cut = 0
    for seed, plan, _ in plans()[::6]:
        long = stretched(plan, 6)
        found = messages(long)
        with monkeypatch.context() as patch:
            patch.setattr("offbeat.core.verify.check.shorten_phases", lambda plan: plan)
            assert messages(long) == found, seed
        short = shorten_phases(long)
        assert shorten_phases(short) == short
        cut += short is not long
    assert cut > 10
