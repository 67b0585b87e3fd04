"""Facts of the plans of strategies."""

from __future__ import annotations

import pytest

from offbeat import P3, WFBP, DeAR, LocalSGD, Profile, Strategy
from offbeat.core.derive.traits import PlanTraits
from offbeat.strategies import DeFT, DreamDDP

PROFILE = Profile.from_dict(
    {
        "schema": 1,
        "world_size": 2,
        "links": [{"name": "net", "latency_s": 0.01, "bytes_per_s": 1e4}],
        "buckets": [
            {"name": str(b), "forward_s": 0.1, "backward_s": 0.2, "size_bytes": 4000}
            for b in range(4)
        ],
        "update_s": 0.01,
    }
)


@pytest.mark.parametrize(
    ("strategy", "facts"),
    [
        (WFBP(), {"averages_gradients", "sends_only_gradients", "allows_own_steps"}),
        (
            P3(),
            {"on_arrival", "averages_gradients", "sends_only_gradients", "allows_own_steps"}
            | {"splits_forward"},
        ),
        (DeFT(), {"late", "sends_only_gradients"}),
        (LocalSGD(4), {"allows_own_steps", "moves_at_end"}),
        (DreamDDP(4), {"early", "allows_own_steps", "moves_in_backward"}),
    ],
    ids=lambda value: value.name if isinstance(value, Strategy) else "",
)
def test_facts_of_plans(strategy: Strategy, facts: set[str]) -> None:
    traits = PlanTraits(strategy.plan(PROFILE))
    assert {name for name, value in vars(traits).items() if value is True} == facts


def test_a_remedy_is_for_updates_outside_of_the_step() -> None:
    known = {s.name: PlanTraits(s.plan(PROFILE)).remedy for s in (WFBP(), DeAR(), DreamDDP(4))}
    assert [name for name, remedy in known.items() if remedy is None] == ["wfbp"]
