"""The conformance suite for other people's strategies: it lets good ones pass, and no others."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from cases.strategy_lists import STRATEGIES

from offbeat.plan import Moment, Phases, Plan, local, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import Planned
from offbeat.testing.conformance import conforms, moves_everything
from offbeat.testing.equations import synchronous

PROFILE = Profile(
    tuple(Bucket(str(b), 0.01, 0.02, 1000 * (b + 1)) for b in range(3)),
    (Link("net", 1e-3, 1e6),),
    world_size=2,
)


@dataclass(frozen=True)
class Mine(Planned):
    """Every gradient in so many slices."""

    slices: int = 2

    name: ClassVar[str] = "mine"
    citation: ClassVar[str] = "none"

    def schedule(self, profile):
        return Plan(
            self.name,
            len(profile.buckets),
            tuple(
                transfer(
                    "grad",
                    range(b, b + 1),
                    after=Moment("grad", b),
                    before=Moment("step"),
                    phases=[0],
                    link="net",
                    part=part,
                    parts=self.slices,
                )
                for b in range(len(profile.buckets))
                for part in range(self.slices)
            ),
            (local(len(profile.buckets), Moment("step"), [0]),),
        )

    def bound_s(self, profile):
        return 0.0

    def equations(self, plan):
        return synchronous()


def test_a_good_one_passes():
    conforms(Mine(), PROFILE)
    conforms(Mine(slices=1), PROFILE)


class WithoutASlice(Mine):
    def schedule(self, profile):
        plan = super().schedule(profile)
        return replace(plan, transfers=plan.transfers[:-1])


class Moody(Mine):
    calls: ClassVar[list[int]] = []

    def schedule(self, profile):
        self.calls.append(0)
        plan = super().schedule(profile)
        return replace(plan, transfers=plan.transfers[:: (-1) ** len(self.calls)])


class Signed(Mine):
    def schedule(self, profile):
        return replace(super().schedule(profile), strategy="yours")


class Boundless(Mine):
    def bound_s(self, profile):
        return float("nan")


class HalfSteps(Mine):
    """Sound as local SGD is, but not what its equations say."""

    def schedule(self, profile):
        plan, last = super().schedule(profile), Phases([1])
        averages = tuple(
            transfer(
                "param",
                range(b, b + 1),
                after=Moment("step"),
                before=Moment("end"),
                phases=last,
                link="net",
            )
            for b in range(plan.buckets)
        )
        applies = (local(plan.buckets, Moment("step"), range(2)),)
        return replace(plan, transfers=averages, applies=applies, period=2)


class Unproven(Mine):
    def equations(self, plan):
        return Planned.equations(self, plan)


@pytest.mark.parametrize(
    ("strategy", "error", "words"),
    [
        (WithoutASlice(), AssertionError, "bucket 2 is only averaged in part"),
        (Moody(), AssertionError, "plans differently the second time"),
        (Signed(), AssertionError, "signs its plan as 'yours'"),
        (Boundless(), AssertionError, "must be a time"),
        (HalfSteps(), AssertionError, "away from those of its equations"),
        (Unproven(), NotImplementedError, "Unproven has no equations: define `equations"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Planned) else "",
)
def test_others_do_not(strategy, error, words):
    with pytest.raises(error, match=words):
        conforms(strategy, PROFILE)


def test_a_bucket_that_moves_in_part():
    plan = Mine().plan(PROFILE)
    with pytest.raises(AssertionError, match="of bucket 2 only 1/2 is moved per cycle"):
        moves_everything(replace(plan, transfers=plan.transfers[:-1]))
    with pytest.raises(AssertionError, match="bucket 0 is moved 3/2 times per cycle"):
        moves_everything(replace(plan, transfers=(plan.transfers[0], *plan.transfers)))


def test_plans_do_not_depend_on_the_process():
    """Ranks plan for themselves and compare digests: no order may come from hashing."""
    code = (
        "from offbeat.strategies import find; from offbeat.profile import Profile; "
        "import json, sys; profile = Profile.from_dict(json.load(sys.stdin)); "
        f"print([find(name)().plan(profile).digest for name in {[*STRATEGIES]}])"
    )
    told = json.dumps(PROFILE.to_dict())
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        input=told,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [cls().plan(PROFILE).digest for cls in STRATEGIES.values()]
    assert elsewhere.stdout.strip() == str(here)
