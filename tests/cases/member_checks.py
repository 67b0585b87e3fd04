"""Scenarios of members, run and compared with their equations in float64."""

from __future__ import annotations

import re

from harness.ranks import watch_ranks

from cases.member_jobs import (
    Average,
    Outcome,
    Scenario,
    epochs_of,
    expected,
    largest_difference,
    membership_service,
    train_member,
)
from offbeat.membership import Epoch

NEAR = 1e-12


def run(scenario: Scenario) -> tuple[list[Outcome | None], list[Epoch]]:
    """Run a scenario. Return the outcomes by process, None for killed ones, and the epochs."""
    ends = [who for who, name in scenario.inject.items() if name.startswith("end")]
    killed = [*scenario.kills, *scenario.signals, *ends]
    with membership_service() as address:
        ended = watch_ranks(
            scenario.processes, train_member, address, scenario, timeout_s=110, doomed=killed
        )
        epochs = epochs_of(address)
    for one in ended:
        if one.rank in scenario.orphans:
            assert one.kind == "RuntimeError", one
            assert re.search(r"rank \d+ \((rank \d of )?member \S+\) has failed", one.error), one
        else:
            assert one.rank in killed or not one.kind, one.error + one.traceback
    return [one.result for one in ended], epochs


def check(scenario: Scenario, average_at: Average) -> list[Epoch]:
    """Run a scenario and compare its weights with the equations. Return the epochs."""
    return compare(scenario, average_at, *run(scenario))


def compare(
    scenario: Scenario, average_at: Average, outcomes: list[Outcome | None], epochs: list[Epoch]
) -> list[Epoch]:
    """Compare the weights of a scenario with the equations. Return the epochs."""
    right = expected(scenario, epochs, numbers_of(scenario, outcomes, epochs), average_at)
    assert largest_difference(outcomes, right) < NEAR
    return epochs


def numbers_of(
    scenario: Scenario, outcomes: list[Outcome | None], epochs: list[Epoch]
) -> dict[str, int]:
    """Return the numbers of the members by their names in the job."""
    ranks = scenario.ranks
    names = {one.name: who // ranks for who, one in enumerate(outcomes) if one is not None}
    names |= {name: who for who, name in enumerate(epochs[0].members)}  # also of killed ones
    for name in (name for epoch in epochs for name in epoch.members):
        names.setdefault(name, max(scenario.joins, default=0) // ranks)  # requested to join twice
    return names
