"""Plans that run while members of the job change, and plans that are refused."""

from __future__ import annotations

import pytest

from offbeat.core.strategy.parsing import parse
from offbeat.elastic.members import JoinState, Members, require_supported_plan
from offbeat.profile import Bucket, Link, Profile

PROFILE = Profile(
    tuple(Bucket(f"b{b}", 0.5, 0.8, 100 * (b + 1)) for b in range(4)), (Link("net", 0.1, 100.0),), 3
)


def require(text: str, state: JoinState = "copy") -> None:
    strategy = parse(text)
    settings = Members("127.0.0.1:1", join_state=state)
    require_supported_plan(strategy.plan(PROFILE), strategy, settings)


ACCEPTED = [
    "wfbp", "bsp", "p3", "local-sgd:period=3", "dreamddp:period=2", "selsync:max_period=3",
    "fedavg", "des-loc:period=2", "dreamddp:period=2:due=forward", "diloco:period=4:delay=1",
    "dreamddp:period=3:due=delayed:state=local", "diloco:period=4:delay=1:alpha=0.5",
    "dreamddp:period=2:wire=int8", "dreamddp:period=3:due=delayed:gain=0.5:wire=int4",
    "diloco:wire=sign", "selsync:max_period=3:wire=powersgd:1", "sparseloco:period=2",
    "fedavg:wire=int8",
]  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED)
def test_averages_that_may_be_skipped(text: str) -> None:
    require(text)


@pytest.mark.parametrize(
    ("text", "state", "problem"),
    [
        ("cyclic", "copy", "applies gradients of several iterations together"),
        ("selsync:aggregate=gradients", "copy", "averages gradients in some iterations only"),
        ("wfbp", "fresh", "keeps optimizer states equal"),
        ("wfbp:wire=int8", "copy", "encodes gradients, of which the survivors of a failure"),
        ("demo", "copy", "encodes gradients, of which the survivors of a failure"),
        ("noloco:period=2", "copy", "sends between single members"),
        ("eager:period=2", "copy", "completes an average with values that each rank keeps"),
        ("dear", "copy", "divides averages into halves"),
        ("selsync", "copy", "averages some parameters only after a vote; set max_period"),
    ],
)
def test_other_plans_are_refused_with_their_reason(
    text: str, state: JoinState, problem: str
) -> None:
    with pytest.raises(ValueError, match="must be one whose averages may be skipped") as refused:
        require(text, state)
    assert problem in str(refused.value)
