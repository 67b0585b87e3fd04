"""DiLoCo with averages due at the next forward: never slower, also for scripts that clip."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from cases.models import Case, profile_of
from hypothesis import given, settings
from oracle import random_timelines

from offbeat.core.guards.script_usage import conflict_with
from offbeat.core.verify.check import check
from offbeat.profile import Bucket, Link, Profile, ScriptUsage
from offbeat.sim import predict
from offbeat.strategies import DiLoCo

PROFILES = random_timelines.profiles(most_buckets=6)
SETTINGS = [
    {"fragments": fragments, "delay": delay, "average": average}
    for fragments, delay, average in product(
        (1, 2, None), (0, 1), ("after_update", "before_update")
    )
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(max_examples=4, deadline=None)
@given(profile=PROFILES)
def test_no_plan_is_slower_than_with_deadlines_at_the_end(setting, profile):
    setting = setting | {"fragments": setting["fragments"] and min(2, len(profile.buckets))}
    ending = DiLoCo(period=3, **setting)
    strategy = replace(ending, due="forward")
    before, after = predict(ending, profile), predict(strategy, profile)
    assert after.iteration_s <= before.iteration_s * (1 + 1e-9)
    assert after.iteration_s >= strategy.bound_s(profile) * (1 - 1e-9)
    assert not check(after.plan)


def model(layers=12):
    """A unit of time for the forward of a layer, two for its backward; a message takes `layers`
    units."""
    buckets = tuple(Bucket(str(n), 1.0, 2.0, 10) for n in range(layers))
    return Profile(buckets, (Link("net", 0.0, 10 / layers),), 2)


def test_one_fragment_hides_behind_its_last_backward_and_the_next_forward():
    """The link carries 12 messages of 12 units without a pause, from the first gradient at 2 on.
    Bucket 0 must be the first one, so at least the forward of two buckets follows the last one. In
    the order of the gradients all 12 forwards would follow it."""
    profile = model()
    blocking = predict(DiLoCo(10, fragments=1), profile)
    assert blocking.iteration_s == pytest.approx(36 + 144 / 10)
    ahead = predict(DiLoCo(10, fragments=1, due="forward"), profile)
    assert ahead.iteration_s == pytest.approx(36 + (2 + 144 + 2 - 36) / 10)


def test_updates_stay_at_the_step_where_nothing_is_sent():
    plan = DiLoCo(10, fragments=1, due="forward").plan(model())
    points = {apply.at.point: set(apply.phases) for apply in plan.applies if apply.rule == "local"}
    assert points == {"grad": {9}, "step": set(range(9))}


def test_a_delay_hides_more_if_messages_leave_in_backward():
    profile = model()
    late, early = (predict(DiLoCo(4, fragments=2, delay=1, due=due), profile) for due in DUES)
    assert {t.after.point for t in late.plan.transfers} == {"step"}
    assert {t.after.point for t in early.plan.transfers} == {"grad"}
    assert early.iteration_s < late.iteration_s * 0.95


DUES = ("end", "forward")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_variants_for_scripts_that_clip_have_no_conflict(setting):
    strategy = DiLoCo(period=3, due="forward", **setting)
    everything = ScriptUsage(True, True, True, True, backwards=2, alters=True, hooks=True)
    profile = profile_of(Case("mlp", "nesterov"), 2)
    variant = strategy.at_step() or strategy
    assert variant.at_step() is None
    assert conflict_with(everything, variant.plan(profile)) is None
    assert variant.average == setting["average"] or not setting["delay"]


def test_codes_travel_with_late_deadlines():
    for delay in (0, 1):
        plan = DiLoCo(4, fragments=1, delay=delay, due="forward", wire="int4").plan(model())
        assert not check(plan)
        assert all(t.wire is not None for t in plan.transfers)
