"""Jobs whose members change while they are planned again for measured times."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.member_drifting import (
    CHANGE_AT,
    DriftingOutcome,
    DriftingScenario,
    by_plans,
    train,
)
from cases.member_jobs import Average, epochs_of, expected, largest_difference, membership_service
from harness.ranks import watch_ranks

from offbeat import P3, DreamDDP
from offbeat.core.profile.elsewhere import for_members, with_slower_links
from offbeat.membership import Epoch
from offbeat.plan import Payload

NEAR = 1e-12


def run(scenario: DriftingScenario) -> tuple[dict[int, DriftingOutcome], list[Epoch]]:
    """Run a scenario. Return the outcomes of all processes that have not ended early, by process,
    and the epochs."""
    with membership_service() as address:
        ended = watch_ranks(
            scenario.processes, train, address, scenario, timeout_s=110, doomed=[*scenario.ends_in]
        )
        epochs = epochs_of(address)
    found = {one.rank: one for one in ended if one.rank not in scenario.ends_in}
    assert not any(one.kind for one in found.values()), [
        one.error + one.traceback for one in found.values()
    ]
    return {rank: one.result for rank, one in found.items()}, epochs


def require_equations(
    scenario: DriftingScenario,
    found: dict[int, DriftingOutcome],
    epochs: list[Epoch],
    average_at: Average,
) -> None:
    """Require equal plans on all processes, and weights that equal the equations."""
    for one in found.values():
        for t, plan in one.plans.items():
            assert plan.digest == found[0].plans[t].digest, t
    names = {one.outcome.name: who for who, one in found.items()}
    names |= {name: who for who, name in enumerate(epochs[0].members)}
    outcomes = [found[who].outcome if who in found else None for who in range(scenario.processes)]
    assert largest_difference(outcomes, expected(scenario, epochs, names, average_at)) < NEAR


@pytest.mark.parametrize("place", ["exchange", "change"])
def test_measured_times_continue_when_members_fail_and_join(place: str, tmp_path: Path) -> None:
    """Messages take four times as long as in the profile. Process 1 ends when the job is to be
    planned again. Process 2 is twice as slow as the others, and has another rank afterwards. The
    process that joins is three times as slow, which is not known before it has trained."""
    scenario = DriftingScenario(
        DreamDDP(period=3, fill=False, split=False), 36, joins={3: 19}, join_after=1,
        scales=(1.0, 1.0, 2.0, 3.0), message_times=4.0, ends_in={1: place},
        folder=str(tmp_path),
    )  # fmt: skip
    found, epochs = run(scenario)
    firsts = [(len(epoch.members), epoch.first_iteration) for epoch in epochs]
    assert firsts == [(3, 0), (2, CHANGE_AT), (3, 21)]
    plans, profiles, known = found[0].plans, found[0].profiles, scenario.profile
    require_equations(scenario, found, epochs, by_plans(scenario, plans, [f for _, f in firsts]))
    fast, measured_at = with_slower_links(known, 4.0), 18 if place == "exchange" else CHANGE_AT
    for t, members, times in (
        (8, [0, 1, 2], [1, 1, 2]), (9, [0, 2], [1, 2]), (18, [0, 2], [1, 2]),
        (21, [0, 2, None], [1, 2, 1.5]), (35, [0, 2, None], [1, 2, 3]),
    ):  # fmt: skip
        base = for_members(fast if t >= measured_at else known, len(members), members)
        payload = Payload("param", range(len(known.buckets)))
        seconds = profiles[t].message_s(payload, "net")
        assert seconds == pytest.approx(base.message_s(payload, "net")), t
        own_s, known_s = (p.forward_s + p.backward_s + p.update_s for p in (profiles[t], known))
        found_times = [scale * own_s / known_s for scale in profiles[t].scale_of_ranks]
        assert found_times == pytest.approx(times), t
    changes = [t for t in plans if t and plans[t].digest != plans[t - 1].digest]
    assert measured_at in changes


def test_all_ranks_repeat_the_averages_of_one_plan() -> None:
    """Process 2 fails when the others have agreed on another order of the messages. The survivors
    repeat messages, so no process may train in this order before all have adopted it. The members
    compare their requests in between, because a plan begins with a boundary."""
    scenario = DriftingScenario(
        P3(slice_elements=8), 15, scales=(1.0, 1.0, 1.0), message_times=0.5, loses_change=2
    )
    found, epochs = run(scenario)
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (3, CHANGE_AT)]
    require_equations(scenario, found, epochs, lambda *_: None)
    plans = found[0].plans
    assert [t for t in plans if t and plans[t].digest != plans[t - 1].digest] == [CHANGE_AT]


def test_a_member_dies_in_the_change_to_a_plan_that_the_script_needs() -> None:
    """The script writes gradients before the first step, so that updates of buckets must wait for
    the step. Process 1 ends when the ranks agree on that plan."""
    scenario = DriftingScenario(
        P3(slice_elements=8), 6, scales=(1.0, 1.0, 1.0), ends_in={1: "change"},
        writes_gradients=True,
    )  # fmt: skip
    found, epochs = run(scenario)
    assert [(len(e.members), e.first_iteration) for e in epochs] == [(3, 0), (2, 1)]
    require_equations(scenario, found, epochs, lambda *_: None)
    assert found[0].plans[0].digest != found[0].plans[1].digest
